"""The socket that the front door listens on."""

import asyncio
import socket

from shoal.actors.ingress.actor import listen
from shoal.actors.messages import HttpConfig


async def sends_at_once() -> bool:
    accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.set_result(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        writer.close()

    listener = listen(HttpConfig(port=0))
    async with await asyncio.start_server(accept, sock=listener):
        host, port = listener.getsockname()
        _, writer = await asyncio.open_connection(host, port)
        answer = await asyncio.wait_for(accepted, 10)
        writer.close()
        await writer.wait_closed()
    return answer


def test_the_pieces_of_an_answer_do_not_wait_for_acknowledgements() -> None:
    assert asyncio.run(sends_at_once())
