"""The whole way: openai client, ingress, router, engines."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from openai import BadRequestError, NotFoundError
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from shoal.actors.ingress.choices import seed_of
from tests.cluster.served import Served, wait_for
from tests.exported_metrics import told_to_ray

PROMPT = "the quick brown fox"


def complete(served: Served, prompt: str, max_tokens: int = 20, **more: object) -> str:
    answer = served.client().completions.create(
        model=model(served),
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        **more,  # type: ignore[call-overload]
    )
    text: str = answer.choices[0].text
    return text


def model(served: Served) -> str:
    return served.client().models.list().data[0].id


def test_actors_are_named_in_the_clusters_namespace(served: Served) -> None:
    engines = served.engine_names()
    (router,) = [name for name in served.names() if name.startswith("router-")]
    deployment = router.removeprefix("router-")
    assert deployment.startswith("tiny.") or "." in deployment
    assert [name.rsplit("-", 1)[0] for name in engines] == [f"engine-{deployment}-{i}" for i in (0, 1)]
    assert served.names() == {"supervisor", router, "ingress-0", *engines}


def test_what_a_person_is_told_at_the_start(served: Served) -> None:
    for name in served.engine_names():
        assert f"{name}: cpu-" in served.output
    assert "memory 300MiB = weights" in served.output
    assert "(context 4096)" in served.output


def test_an_answer_streamed_is_the_answer_whole(served: Served) -> None:
    whole = complete(served, PROMPT)
    assert whole
    stream = served.client().completions.create(
        model=model(served), prompt=PROMPT, max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole


def test_chat(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=model(served),
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        seed=7,
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 5


def test_a_seed_repeats_and_another_differs(served: Served) -> None:
    def drawn(seed: int) -> str:
        answer = served.client().completions.create(
            model=model(served), prompt=PROMPT, max_tokens=30, temperature=1.5, seed=seed
        )
        return answer.choices[0].text

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_choices_of_a_prompt_are_each_what_they_are_alone_and_it_is_computed_once(served: Served) -> None:
    def drawn(seed: int, n: int) -> list[str]:
        answer = served.client().completions.create(
            model=model(served), prompt=f"{PROMPT} jumps", max_tokens=30, temperature=1.5, seed=seed, n=n
        )
        assert answer.usage is not None and answer.usage.prompt_tokens < 40
        return [choice.text for choice in answer.choices]

    def num_forked() -> int:
        asked = [served.actor(name).__ray_call__.remote(_num_forked) for name in served.engine_names()]
        return sum(ray.get(asked, timeout=30))

    before = num_forked()
    together = drawn(1, n=4)
    assert num_forked() == before + 3
    assert together == [text for i in range(4) for text in drawn(seed_of(1, i), n=1)]
    assert len(set(together)) == 4


def _num_forked(actor: Any) -> int:
    return int(actor._built.scheduler.num_forked)


def test_many_at_once_are_answered_as_each_alone_and_spread_over_the_engines(served: Served) -> None:
    prompts = [f"{PROMPT} {i}" for i in range(24)]
    alone = [complete(served, prompt) for prompt in prompts[:4]]
    most: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for name, load in ray.get(served.actor("router").loads.remote(), timeout=10).items():
                most[name] = max(most.get(name, 0), load)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda prompt: complete(served, prompt, 40), prompts))
    done.set()
    watcher.join(timeout=10)
    assert [answer[: len(text)] for answer, text in zip(answers, alone, strict=False)] == alone
    assert sorted(most) == served.engine_names()
    assert max(most.values()) <= 1.5 * min(most.values()), most


@pytest.mark.parametrize("streaming", [True, False], ids=["50 streaming", "51 not streaming"])
def test_a_client_that_leaves_ends_its_request_within_a_second(served: Served, *, streaming: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3500, "temperature": 0, "stream": streaming}
    if streaming:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            for _ in range(3):
                next(lines)
            assert served.num_requests() == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.5)
    wait_for(lambda: served.num_requests() == 0, "the engine let go", within_s=1.0)


def test_43_a_prompt_of_the_whole_context_is_refused_and_the_next_is_served(served: Served) -> None:
    for length in (4096, 4097):
        with pytest.raises(BadRequestError, match="4096"):
            complete(served, "a" * 2 * length)
    assert complete(served, PROMPT)


def test_75_an_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(NotFoundError):
        served.client().completions.create(model="another", prompt="x")


def test_a_second_cluster_of_the_same_name_is_refused(
    served: Served, ray_address: str, checkpoint: Path
) -> None:
    with Served.start(checkpoint, ray_address, name=served.name) as second:
        assert second.process.wait(timeout=60) == 1
        assert f"a cluster named '{served.name}' runs in this Ray already" in second.output
    assert served.get("/ready") == 200


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        (
            "--engines",
            "9",
            "9 engines of 1 threads need 9 CPUs; Ray has 6 free: lower --engines or --threads",
        ),
        ("--memory", "9000GiB", "1 engines of 9000GiB need 9000GiB; Ray has "),
    ],
)
def test_more_than_ray_has_is_refused(
    ray_address: str, checkpoint: Path, flag: str, value: str, message: str
) -> None:
    with Served.start(checkpoint, ray_address, flag, value) as cluster:
        assert cluster.process.wait(timeout=60) == 1
        assert f"error: {message}" in cluster.output


def test_every_process_tells_ray_all_its_metrics_and_nobody_tells_them_twice(served: Served) -> None:
    def scraped() -> list[Sample]:
        (node,) = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        families = text_string_to_metric_families(httpx.get(url, timeout=10).text)
        samples = [sample for family in families for sample in family.samples]
        return [sample for sample in samples if sample.labels.get("shoal_cluster") == served.name]

    complete(served, PROMPT)
    wanted = told_to_ray(but_by="store")
    wait_for(lambda: wanted <= {sample.name for sample in scraped()}, "all metrics of all roles")
    samples = scraped()
    assert {sample.name for sample in samples} == wanted
    workers = {(sample.labels["process"], sample.labels["WorkerId"]) for sample in samples}
    processes = sorted(process for process, _ in workers)
    ingress, *others = sorted(processes, key=lambda name: not name.startswith("ingress-"))
    assert ingress.startswith("ingress-")
    assert others == sorted([*served.engine_names(), "router", "supervisor"])
    models = {(sample.labels["process"], sample.labels.get("model_name")) for sample in samples}
    assert {(name, model(served)) for name in (ingress, "router", *served.engine_names())} <= models


def test_everything_is_returned_when_nobody_asks(served: Served) -> None:
    def invariants() -> dict[str, dict[str, Any]]:
        response = httpx.get(f"{served.url}/debug/invariants", timeout=30)
        assert response.status_code == 200
        said: dict[str, dict[str, Any]] = response.json()
        return said

    wait_for(lambda: invariants()["clean"], "all is returned")
    assert {"http", *served.engine_names()} < invariants()["processes"].keys()
    body = {"prompt": PROMPT, "max_tokens": 3500, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        during = invariants()
    assert not during["clean"]
    held = [entry["outstanding"] for entry in during["processes"].values()]
    assert sum(counts.get("blocks", 0) for counts in held) > 0
    assert sum(counts.get("inboxes", 0) for counts in held) == 1
    wait_for(lambda: invariants()["clean"], "all is returned again", within_s=2.0)
