"""The front door's process without Ray: what its clients are told when it stops."""

import asyncio
from pathlib import Path

import httpx
import pytest

from shoal.actors.ingress.actor import IngressActor
from shoal.actors.messages import EngineId, HttpConfig, ModelCard
from tests.ingress.checkpoints import byte_level_tokenizer, save_checkpoint
from tests.ingress.fake_actors import FakeEngine, FakeRouter

ENGINE = EngineId("engine")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_not_done_is_answered_before_the_connection_is_closed(
    tmp_path: Path, stream: bool
) -> None:
    checkpoint = save_checkpoint(tmp_path, byte_level_tokenizer())
    model = ModelCard(
        name="tiny", checkpoint=str(checkpoint), max_model_len=128, block_size=4, fingerprint=b"tiny"
    )

    async def scenario() -> httpx.Response:
        ingress, engine = IngressActor(model, HttpConfig(port=0)), FakeEngine()
        info = await ingress.start()
        await ingress.introduce(FakeRouter(ENGINE), {ENGINE: engine}, {}, b"tiny")
        async with httpx.AsyncClient(base_url=info.url, timeout=10, trust_env=False) as client:
            body = {"prompt": "hello", "stream": stream}
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.submitted:
                await asyncio.sleep(0.01)
            await ingress.stop(0.1)
            assert engine.aborted
            return await asked

    response = asyncio.run(scenario())
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "stopping"
