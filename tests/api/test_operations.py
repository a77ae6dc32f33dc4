"""What operators and proxies meet: metrics, limits, deadlines, and the endpoints beside OpenAI's."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.types import Message

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.edge import LAST_WORDS_S
from shoal.actors.ingress.gate import GateConfig
from shoal.actors.ingress.metrics import Outcome
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import (
    DraftCounts,
    EngineId,
    EngineLoad,
    ErrorKind,
    FinishReason,
    ModelCard,
    RequestError,
)
from tests.api.fakes import FakeDispatcher, Script, guarding, serving_one
from tests.ingress.checkpoints import tokens_of
from tests.ingress.virtual_time import run_in_virtual_time

BOS = 0


class Door:
    """An application of its own in virtual time."""

    def __init__(self, card: ModelCard, codec: TextCodec, **limits: Any) -> None:
        self.dispatcher = FakeDispatcher()
        self.app: FastAPI = create_app(models=serving_one(card, codec, self.dispatcher), **limits)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client

    def post(self, path: str, body: Any = None) -> httpx.Response:
        async def posted() -> httpx.Response:
            async with self.client() as client:
                return await client.post(path, json=body)

        return run_in_virtual_time(posted())

    def metrics(self) -> dict[str, float]:
        async def got() -> str:
            async with self.client() as client:
                return (await client.get("/metrics")).text

        return samples(run_in_virtual_time(got()))


def samples(exposition: str) -> dict[str, float]:
    """name{label=value} → value; of ours without the only model's name."""

    def labelled(sample: Sample) -> str:
        left_out = () if ":" in sample.name else ("model_name",)
        shown = sorted((label, value) for label, value in sample.labels.items() if label not in left_out)
        return sample.name + "".join(f"{{{label}={value}}}" for label, value in shown)

    families = text_string_to_metric_families(exposition)
    return {labelled(sample): sample.value for family in families for sample in family.samples}


@pytest.fixture
def door(card: ModelCard, codec: TextCodec) -> Door:
    return Door(card, codec)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("timeout", "seconds"), [(2.5, "2.5"), (None, "9"), (99, "9")])
def test_a_request_ends_at_its_deadline_which_is_at_most_the_servers(
    card: ModelCard, codec: TextCodec, stream: bool, timeout: float | None, seconds: str
) -> None:
    door = Door(card, codec, timeout_s=9.0)
    door.dispatcher.script = Script(hangs=True)
    response = door.post("/v1/completions", {"prompt": "", "stream": stream, "timeout": timeout})
    assert response.status_code == 504
    error = response.json()["error"]
    assert error["message"] == f"The answer was not complete within {seconds} seconds."
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert door.dispatcher.aborted == door.dispatcher.opened
    assert door.metrics()["shoal_request_errors_total{code=timeout}"] == 1


def test_a_stream_ends_at_its_deadline_with_an_event(door: Door) -> None:
    door.dispatcher.script = Script(token_ids=tokens_of("alpha"), hangs=True)
    response = door.post("/v1/completions", {"prompt": "", "stream": True, "timeout": 40})
    assert response.status_code == 200
    *events, last = response.text.split("\n\n")[:-1]
    assert events[-2:] == [": keep-alive"] * 2
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert door.dispatcher.aborted == door.dispatcher.opened


def test_a_stream_that_waits_says_so_every_fifteen_seconds(door: Door) -> None:
    door.dispatcher.script = Script(token_ids=tokens_of("alpha"), pause_s=50.0)
    response = door.post("/v1/completions", {"prompt": "", "stream": True})
    kinds = [event[:5] for event in response.text.split("\n\n")[:-1]]
    assert kinds == [*[": kee"] * 3, "data:", *[": kee"] * 3, "data:", "data:", "data:"]


def test_a_silent_engine_does_not_disturb_a_whole_answer(door: Door) -> None:
    door.dispatcher.script = Script(token_ids=tokens_of("alpha"), pause_s=50.0)
    assert door.post("/v1/completions", {"prompt": ""}).json()["choices"][0]["text"] == "alpha"


def test_beyond_its_limit_the_door_is_closed_for_requests_and_open_for_probes(
    card: ModelCard, codec: TextCodec
) -> None:
    door = Door(card, codec, limits=GateConfig(max_requests=2))
    door.dispatcher.script = Script(hangs=True)

    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        async with door.client() as client:
            body = {"prompt": "", "timeout": 5}
            waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
            await asyncio.sleep(1)
            refused, probed = await client.post("/v1/completions", json=body), await client.get("/ready")
            await asyncio.gather(*waiting)
            door.dispatcher.script = Script()
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        return refused, probed

    refused, probed = run_in_virtual_time(scenario())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["x-request-id"]
    assert probed.status_code == 200
    assert door.metrics()["shoal_request_errors_total{code=overloaded}"] == 1


def test_a_full_cluster_is_logged_once_a_second_and_counted_each_time(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    door.dispatcher.script = Script(error=RequestError(kind=ErrorKind.OVERLOADED, message="full"))

    async def scenario() -> None:
        async with door.client() as client:
            for pause_s in (0.0, 0.5, 0.6, 0.0):
                await asyncio.sleep(pause_s)
                response = await client.post("/v1/completions", json={"prompt": ""})
                assert response.status_code == 503

    run_in_virtual_time(scenario())
    assert ["full" in record.getMessage() for record in caplog.records] == [True, True]
    assert door.metrics()["shoal_request_errors_total{code=overloaded}"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_is_given_up_soon_after_the_deadline(
    card: ModelCard, codec: TextCodec, stream: bool
) -> None:
    door = Door(card, codec, timeout_s=9.0)
    door.dispatcher.script = Script(token_ids=tokens_of("alpha"))
    body = json.dumps({"prompt": "", "stream": stream}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}

    async def scenario() -> float:
        requests = asyncio.Queue[Message]()
        requests.put_nowait({"type": "http.request", "body": body})

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        await door.app(scope, requests.get, send)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) == 9.0 + LAST_WORDS_S
    metrics = door.metrics()
    assert metrics["shoal_http_requests_in_flight"] == 1  # the scrape itself
    assert metrics["shoal_request_errors_total{code=timeout}"] == 1


def test_metrics_tell_what_happened(door: Door) -> None:
    door.dispatcher.script = Script(
        token_ids=tokens_of("alpha"),
        pause_s=0.5,
        num_cached_tokens=4,
        num_fetched_tokens=1,
        finish_reason=FinishReason.STOP,
    )
    for stream in (False, True):
        assert door.post("/v1/completions", {"prompt": "the fox", "stream": stream}).status_code == 200
    assert door.post("/v1/completions", {"prompt": 7}).status_code == 400
    assert door.post("/nowhere/at/all").status_code == 404
    metrics = door.metrics()
    expected = {
        "shoal_http_requests_total{endpoint=/v1/completions}{status=200}": 2,
        "shoal_http_requests_total{endpoint=/v1/completions}{status=400}": 1,
        "shoal_http_requests_total{endpoint=none}{status=404}": 1,
        "shoal_http_requests_in_flight": 1,  # the scrape itself
        "shoal_http_request_duration_seconds_count{endpoint=/v1/completions}": 3,
        "shoal_requests_total{outcome=completed}": 2,
        "shoal_requests_total{outcome=refused}": 1,
        "shoal_requests_total{outcome=failed}": 0,
        "shoal_choices_finished_total{reason=stop}": 2,
        "shoal_choices_finished_total{reason=length}": 0,
        "shoal_placements_total{by=load}": 2,
        "shoal_request_errors_total{code=timeout}": 0,
        "shoal_prompt_tokens_total": 2 * len(door.dispatcher.opened[0].prompt_token_ids),
        "shoal_cached_prompt_tokens_total{place=device}": 2 * 4,
        "shoal_cached_prompt_tokens_total{place=own_store}": 2 * 1,
        "shoal_cached_prompt_tokens_total{place=other_store}": 0,
        "shoal_completion_tokens_total": 2 * len(tokens_of("alpha")),
        "shoal_time_to_first_token_seconds_count": 2,
        "shoal_time_to_first_token_seconds_sum": 2 * 0.5,
        "shoal_inter_token_latency_seconds_count": 2,
        "shoal_inter_token_latency_seconds_sum": 2 * 0.5,
        "shoal_e2e_request_latency_seconds_count": 2,
        "shoal_e2e_request_latency_seconds_sum": 2 * 2 * 0.5,
        "shoal_request_prompt_tokens_count": 2,
        "shoal_request_generation_tokens_sum": 2 * len(tokens_of("alpha")),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in metrics if not name.startswith(("shoal_", "vllm:")) or "_created" in name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (Script(token_ids=tokens_of("alpha")), "completed"),
        (Script(error=RequestError(kind=ErrorKind.INVALID, message="no")), "refused"),
        (Script(error=RequestError(kind=ErrorKind.OVERLOADED, message="full")), "overloaded"),
        (Script(error=RequestError(kind=ErrorKind.ENGINE_LOST, message="gone")), "failed"),
        (
            Script(
                token_ids=tokens_of("alpha"), error=RequestError(kind=ErrorKind.INTERNAL, message="broken")
            ),
            "failed",
        ),
        (Script(hangs=True), "failed"),
        (Script(raises=RuntimeError("a bug")), "failed"),
    ],
)
def test_each_request_for_an_answer_has_one_outcome(
    door: Door, script: Script, outcome: str, stream: bool
) -> None:
    door.dispatcher.script = script
    door.post("/v1/completions", {"prompt": "", "stream": stream, "timeout": 5})
    door.post("/tokenize", {"prompt": ""})
    metrics = door.metrics()
    name = "shoal_requests_total{outcome="
    counts = {key.removeprefix(name)[:-1]: n for key, n in metrics.items() if key.startswith(name)}
    assert counts == {o.value: float(o == outcome) for o in Outcome}


def test_vllms_names_are_there_too(door: Door) -> None:
    door.dispatcher.script = Script(token_ids=tokens_of("alpha"), num_cached_tokens=2, num_fetched_tokens=1)
    door.dispatcher.engines = {
        EngineId("engine-0-a"): EngineLoad(
            num_running=3,
            num_waiting=1,
            kv_usage=0.25,
            drafts=DraftCounts(num_drafts=4, num_tokens=20, num_accepted=15),
        ),
        EngineId("engine-1-b"): EngineLoad(num_running=0, num_waiting=0, kv_usage=0.0),
    }
    door.post("/v1/completions", {"prompt": "the fox"})
    num_prompt = len(door.dispatcher.opened[0].prompt_token_ids)
    metrics = door.metrics()
    one, other = ("{engine=engine-0-a}{model_name=org/tiny}", "{engine=engine-1-b}{model_name=org/tiny}")
    model = "{model_name=org/tiny}"
    expected = {
        f"vllm:num_requests_running{one}": 3,
        f"vllm:num_requests_running{other}": 0,
        f"vllm:num_requests_waiting{one}": 1,
        f"vllm:kv_cache_usage_perc{one}": 0.25,
        f"vllm:spec_decode_num_drafts_total{one}": 4,
        f"vllm:spec_decode_num_draft_tokens_total{one}": 20,
        f"vllm:spec_decode_num_accepted_tokens_total{one}": 15,
        f"vllm:prompt_tokens_total{model}": num_prompt,
        f"vllm:generation_tokens_total{model}": len(tokens_of("alpha")),
        f"vllm:prefix_cache_queries_total{model}": num_prompt,
        f"vllm:prefix_cache_hits_total{model}": 2,
        f"vllm:external_prefix_cache_queries_total{model}": num_prompt - 2,
        f"vllm:external_prefix_cache_hits_total{model}": 1,
        f"vllm:time_to_first_token_seconds_count{model}": 1,
        f"vllm:inter_token_latency_seconds_count{model}": len(tokens_of("alpha")) - 1,
        f"vllm:e2e_request_latency_seconds_count{model}": 1,
        "vllm:request_success_total{finished_reason=length}" + model: 1,
        "vllm:request_prompt_tokens_bucket{le=+Inf}" + model: 1,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert f"vllm:spec_decode_num_drafts_total{other}" not in metrics, "it does not draft"


def test_a_prompt_is_counted_once_an_engine_has_computed_it(door: Door) -> None:
    refusal = RequestError(kind=ErrorKind.OVERLOADED, message="full")
    door.dispatcher.scripts = {
        (BOS, *tokens_of("fox")): Script(error=refusal, pause_s=1.0),
        (BOS, *tokens_of("the")): Script(token_ids=tokens_of("alpha"), num_cached_tokens=2),
    }
    assert door.post("/v1/completions", {"prompt": ["fox", "the"]}).status_code == 503
    metrics = door.metrics()
    assert metrics["shoal_prompt_tokens_total"] == 1 + len(tokens_of("the"))
    assert metrics["shoal_cached_prompt_tokens_total{place=device}"] == 2


def test_a_client_that_leaves_is_counted_as_one(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    name = "shoal_http_requests_total{endpoint=/v1/completions}{status=499}"
    before = samples(http.get("/metrics").text).get(name, 0)
    dispatcher.script = Script(hangs=True)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": ""}, timeout=0.2)
    assert dispatcher.an_abort.wait(1)
    assert samples(http.get("/metrics").text)[name] == before + 1


def test_tokenize_says_what_a_completion_would_compute(http: httpx.Client) -> None:
    tokens = [BOS, *tokens_of("the fox")]
    answer = http.post("/tokenize", json={"prompt": "the fox", "return_token_strs": True}).json()
    assert answer == {
        "count": len(tokens),
        "max_model_len": 128,
        "tokens": tokens,
        "token_strs": ["<s>", "the", "Ġfox"],
    }
    without = http.post("/tokenize", json={"prompt": "the fox", "add_special_tokens": False}).json()
    assert (without["tokens"], without["token_strs"]) == (tokens[1:], None)


@pytest.mark.parametrize("opens", [True, False])
def test_tokenize_says_what_a_chat_would_compute(
    http: httpx.Client, dispatcher: FakeDispatcher, opens: bool
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "add_generation_prompt": opens}
    http.post("/v1/chat/completions", json={"messages": messages})
    tokens = tuple(http.post("/tokenize", json=body).json()["tokens"])
    assert tokens == dispatcher.opened[0].prompt_token_ids  # this template always opens the answer


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "", "messages": [{"role": "user", "content": ""}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_cannot_be_converted(http: httpx.Client, path: str, body: Any, param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("text", ["the fox", "naïve 日本語 😀", "<s>the<|im_end|>", ""])
def test_detokenize_gives_the_text_back(http: httpx.Client, text: str) -> None:
    assert http.post("/detokenize", json={"tokens": tokens_of(text)}).json() == {"prompt": text}


def test_prefix_caches_can_be_reset(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    assert http.get("/reset_prefix_cache").status_code == 405
    assert http.post("/reset_prefix_cache").json() == {}
    dispatcher.resets = False
    assert http.post("/reset_prefix_cache").status_code == 503


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"])
def test_what_works_asks_for_the_key(card: ModelCard, codec: TextCodec, path: str) -> None:
    door = Door(card, codec, guard=guarding("sk"))
    assert door.post(path, {}).status_code == 401
    assert door.metrics()["shoal_http_requests_total{endpoint=" + path + "}{status=401}"] == 1
