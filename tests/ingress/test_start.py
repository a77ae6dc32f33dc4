"""The front door's process without Ray: it serves as its configuration's files say."""

import asyncio
import ssl
import threading
from pathlib import Path

import httpx
import pytest
import trustme

from shoal.actors.ingress.actor import IngressActor
from shoal.actors.ingress.keys import KeyEntry, hash_of
from shoal.actors.messages import (
    DeploymentCard,
    DeploymentId,
    EngineId,
    HttpConfig,
    IngressAccount,
    ModelCard,
)
from shoal.cluster.key_file import add_key
from tests.ingress.checkpoints import byte_level_tokenizer, save_checkpoint
from tests.ingress.fake_actors import DrawingEngine, FakeEngine, FakeRouter


def an_ingress(folder: Path, http: HttpConfig) -> IngressActor:
    checkpoint = save_checkpoint(folder / "checkpoint", byte_level_tokenizer())
    model = ModelCard(
        name="tiny", checkpoint=str(checkpoint), max_model_len=128, block_size=4, fingerprint=b"tiny"
    )
    return IngressActor(http, [DeploymentCard(deployment_id=DeploymentId("tiny"), model=model, weight=1)])


def test_with_keys_and_a_certificate(tmp_path: Path) -> None:
    authority, pem, keys = trustme.CA(), tmp_path / "both.pem", tmp_path / "keys.yaml"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
    add_key(keys, KeyEntry(name="alice", hash=hash_of("a")))
    http = HttpConfig(port=0, api_keys=str(keys), admin_key_hash=hash_of("root"), ssl_certfile=str(pem))

    async def scenario() -> list[int]:
        ingress = an_ingress(tmp_path, http)
        url = (await ingress.start()).url
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context()
        authority.configure_trust(context)
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=10, trust_env=False) as client:
            statuses = [
                (await client.get(path, headers={"authorization": f"Bearer {key}"})).status_code
                for path in ("/v1/models", "/admin/keys")
                for key in ("a", "root")
            ]
        await ingress.ping()
        await ingress.stop(0.1)
        return statuses

    assert asyncio.run(scenario()) == [200, 401, 401, 200]


@pytest.mark.parametrize(
    ("http", "message"),
    [
        (HttpConfig(port=0, api_keys="/nowhere.yaml"), "--api-keys /nowhere.yaml: No such file"),
        (HttpConfig(port=0, ssl_certfile="/nowhere.pem"), "--ssl-certfile /nowhere.pem: No such file"),
    ],
)
def test_without_its_files_it_does_not_start(tmp_path: Path, http: HttpConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(an_ingress(tmp_path, http).start())


def test_it_is_told_of_no_router_and_of_a_model_that_goes(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", byte_level_tokenizer())
    staying, going = (
        DeploymentCard(
            deployment_id=DeploymentId(name),
            model=ModelCard(
                name=name,
                checkpoint=str(checkpoint),
                max_model_len=128,
                block_size=4,
                fingerprint=b"",
                max_num_seqs=3,
            ),
            weight=2,
        )
        for name in ("staying", "going")
    )

    async def scenario() -> tuple[list[str], dict[str, float], list[object]]:
        broken: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
        ingress = IngressActor(HttpConfig(port=0), [staying, going])
        url = (await ingress.start()).url
        await ingress.introduce([(staying, None, {}), (going, None, {})], {})
        for _ in range(3):  # a task that failed is heard of when the next one takes its place
            await ingress.introduce([(staying, None, {})], {})
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
            models = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
            lines = (await client.get("/metrics")).text.splitlines()
        await ingress.stop(0.1)
        slots = [line.rsplit(" ", 1) for line in lines if line.startswith("shoal_sequence_slots{")]
        return models, {series: float(value) for series, value in slots}, broken

    models, slots, broken = asyncio.run(scenario())
    assert (models, broken) == (["staying"], [])
    assert slots == {
        'shoal_sequence_slots{model_name="staying"}': 6,
        'shoal_sequence_slots{model_name="going"}': 0,
    }


def a_card(name: str, checkpoint: Path) -> DeploymentCard:
    model = ModelCard(
        name=name, checkpoint=str(checkpoint), max_model_len=128, block_size=4, fingerprint=b"f"
    )
    return DeploymentCard(deployment_id=DeploymentId(name), model=model, weight=1)


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_first_start(tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path / "good", byte_level_tokenizer())
    cards = [a_card("good", good), a_card("bad", tmp_path)]
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        asyncio.run(IngressActor(HttpConfig(port=0), cards).start())


def test_later_it_costs_its_own_model_alone_and_that_until_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.actors.ingress.loads.FIRST_PAUSE_S", 0.05)
    good = save_checkpoint(tmp_path / "good", byte_level_tokenizer())
    bad, engine = tmp_path / "bad", EngineId("engine")
    cards = [a_card("bad", bad), a_card("good", good)]

    async def scenario() -> None:
        ingress = IngressActor(HttpConfig(port=0), cards, is_first=False)
        url = (await ingress.start()).url

        async def told() -> IngressAccount:
            return await ingress.introduce(
                [(card, FakeRouter(engine), {engine: DrawingEngine()}) for card in cards], {}
            )

        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:

            async def asked(**body: object) -> tuple[int, str | None]:
                answer = await client.post("/v1/completions", json={"prompt": "hello", **body})
                said = answer.json()
                return answer.status_code, said.get("error", said).get("code")

            account = await told()
            assert account.can_place == {"good"}
            assert "ValueError" in account.unread[DeploymentId("bad")]
            assert await asked(model="good") == (200, None)
            assert await asked(model="bad") == (503, "model_not_ready")
            assert await asked() == (503, "model_not_ready"), "the first is no other for that"
            assert await asked(model="ugly") == (404, "model_not_found")
            assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["good"]
            save_checkpoint(bad, byte_level_tokenizer())
            async with asyncio.timeout(10):
                while (account := await told()).unread:
                    await asyncio.sleep(0.05)
            assert account.can_place == {"good", "bad"}
            assert await asked() == (200, None)
        await ingress.stop(0.1)

    asyncio.run(scenario())


def test_one_that_comes_slowly_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.actors.ingress.actor.LISTEN_AFTER_S", 0.05)
    checkpoint, engine = save_checkpoint(tmp_path / "good", byte_level_tokenizer()), EngineId("engine")
    cards = [a_card("slow", tmp_path / "slow"), a_card("good", checkpoint)]
    is_there = threading.Event()

    def fetch(wanted: str, tell: object) -> str:
        if wanted.endswith("slow"):
            assert is_there.wait(timeout=30)
        return str(checkpoint)

    async def scenario() -> None:
        ingress = IngressActor(HttpConfig(port=0), cards, fetch=fetch, is_first=False)
        await ingress.start()
        told = [(card, None, {engine: FakeEngine()}) for card in cards]
        async with asyncio.timeout(10):
            while not (known := (await ingress.introduce(told, {})).can_place):
                await asyncio.sleep(0.01)
        assert known == {"good"}
        is_there.set()
        async with asyncio.timeout(10):
            while len((await ingress.introduce(told, {})).can_place) < 2:
                await asyncio.sleep(0.01)
        await ingress.stop(0.1)

    asyncio.run(scenario())


def test_an_ingress_says_whom_it_can_place_on(tmp_path: Path) -> None:
    checkpoint, engine = save_checkpoint(tmp_path / "checkpoint", byte_level_tokenizer()), EngineId("engine")
    first, later = a_card("first", checkpoint), a_card("later", checkpoint)

    async def scenario() -> list[set[str]]:
        ingress = IngressActor(HttpConfig(port=0), [first])
        await ingress.start()
        said = [await ingress.introduce([(first, None, {})], {})]
        both = [(first, None, {engine: FakeEngine()}), (later, None, {engine: FakeEngine()})]
        said.append(await ingress.introduce(both, {}))
        async with asyncio.timeout(10):
            while len(said[-1].can_place) < 2:
                await asyncio.sleep(0.01)
                said.append(await ingress.introduce(both, {}))
        await ingress.stop(0.1)
        return [set(account.can_place) for account in said]

    said = asyncio.run(scenario())
    assert said[:2] == [set(), {"first"}]
    assert said[-1] == {"first", "later"}
