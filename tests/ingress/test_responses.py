import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from shoal.actors.ingress.responses import ClientGone, EventStream, while_connected


async def never() -> None:
    await asyncio.Event().wait()


class Client:
    """The two callables that a server gives to an application."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.reads = True
        self.received: list[Message] = []

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.received.append(message)
        if not self.reads:
            await never()


def test_work_is_done_while_the_client_is_there() -> None:
    async def scenario() -> None:
        async def work() -> int:
            return 7

        assert await while_connected(Client().receive, work()) == 7

    asyncio.run(scenario())


def test_work_has_unwound_when_the_client_is_found_gone() -> None:
    async def scenario() -> None:
        client, unwound = Client(), []

        async def work() -> None:
            try:
                client.gone.set()
                await never()
            finally:
                await asyncio.sleep(0)
                unwound.append(True)

        with pytest.raises(ClientGone):
            await while_connected(client.receive, work())
        assert unwound

    asyncio.run(scenario())


def test_a_failure_of_the_work_is_the_callers() -> None:
    async def scenario() -> None:
        async def work() -> None:
            raise LookupError

        with pytest.raises(LookupError):
            await while_connected(Client().receive, work())

    asyncio.run(scenario())


@pytest.mark.parametrize("reads", [True, False], ids=["waiting for an item", "stuck in a full socket"])
def test_case_50_the_items_are_closed_wherever_the_stream_stood(reads: bool) -> None:
    async def scenario() -> None:
        client, closed = Client(), []
        client.reads = reads

        async def items() -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: 1\n\n"
                await never()
            finally:
                closed.append(True)

        running = asyncio.create_task(
            EventStream(items())({"type": "http", "state": {"request_id": "1"}}, client.receive, client.send)
        )
        await asyncio.sleep(0.01)
        assert not closed
        client.gone.set()
        await running
        assert closed

    asyncio.run(scenario())


def test_an_item_may_hold_no_event() -> None:
    async def scenario() -> None:
        client = Client()

        async def items() -> AsyncGenerator[bytes, None]:
            yield b""
            yield b"data: 1\n\n"
            yield b""

        await EventStream(items())({"type": "http"}, client.receive, client.send)
        start, *bodies = client.received
        assert start["type"] == "http.response.start"
        assert [message["body"] for message in bodies] == [b"data: 1\n\n", b""]

    asyncio.run(scenario())
