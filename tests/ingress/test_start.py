"""The front door's process without Ray: it serves as its configuration's files say."""

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from shoal.actors.ingress.actor import IngressActor
from shoal.actors.ingress.keys import KeyEntry, hash_of
from shoal.actors.messages import DeploymentCard, DeploymentId, HttpConfig, ModelCard
from shoal.cluster.key_file import add_key
from tests.ingress.checkpoints import byte_level_tokenizer, save_checkpoint


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
