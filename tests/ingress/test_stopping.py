"""The front door's process without Ray: what its clients are told when it stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from shoal.actors.ingress.actor import IngressActor
from shoal.actors.messages import (
    DeploymentCard,
    DeploymentId,
    EngineId,
    FinishReason,
    HttpConfig,
    ModelCard,
    TokenBatch,
    TokenChunk,
)
from tests.ingress.checkpoints import byte_level_tokenizer, save_checkpoint
from tests.ingress.fake_actors import FakeEngine, FakeRouter

ENGINE = EngineId("engine")


@asynccontextmanager
async def asked(folder: Path, *, stream: bool) -> AsyncIterator["Asked"]:
    """A request that its engine has and says nothing of."""
    checkpoint = save_checkpoint(folder, byte_level_tokenizer())
    model = ModelCard(
        name="tiny", checkpoint=str(checkpoint), max_model_len=128, block_size=4, fingerprint=b"tiny"
    )
    served = DeploymentCard(deployment_id=DeploymentId("tiny"), model=model, weight=1)
    ingress, engine = IngressActor(HttpConfig(port=0), [served]), FakeEngine()
    info = await ingress.start()
    await ingress.introduce([(served, FakeRouter(ENGINE), {ENGINE: engine})], {})
    async with httpx.AsyncClient(base_url=info.url, timeout=10, trust_env=False) as client:
        body = {"prompt": "hello", "stream": stream}
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(10):
            while not engine.submitted:
                await asyncio.sleep(0.01)
        yield Asked(ingress, engine, answer)


@dataclass
class Asked:
    ingress: IngressActor
    engine: FakeEngine
    answer: asyncio.Task[httpx.Response]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_not_done_is_answered_before_the_connection_is_closed(
    tmp_path: Path, stream: bool
) -> None:
    async def scenario() -> httpx.Response:
        async with asked(tmp_path, stream=stream) as request:
            await request.ingress.stop(0.1)
            assert request.engine.aborted
            return await request.answer

    response = asyncio.run(scenario())
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "stopping"


def test_case_56_a_stream_that_ends_within_the_grace_is_whole(tmp_path: Path) -> None:
    async def scenario() -> httpx.Response:
        async with asked(tmp_path, stream=True) as request:
            (submitted,) = request.engine.submitted
            stopping = asyncio.create_task(request.ingress.stop(5.0))
            await asyncio.sleep(0.2)
            for token, end in ((7, None), (8, FinishReason.LENGTH)):
                chunk = TokenChunk(
                    request_id=submitted.request_id, attempt=1, token_ids=(token,), finish_reason=end
                )
                request.engine.outbox.put_nowait(TokenBatch(chunks=(chunk,)))
            response = await request.answer
            await stopping
            assert not request.engine.aborted
            return response

    response = asyncio.run(scenario())
    assert response.status_code == 200
    assert response.text.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in response.text.replace(" ", "")
