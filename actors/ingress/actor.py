"""The ingress's process: an HTTP server beside a dispatcher, on one event loop."""

import asyncio
import errno
import math
import socket
import uuid
from collections.abc import Mapping
from typing import Any

import uvicorn

from shoal.actors.ingress.interpreter import settle
from shoal.actors.ingress.streams import EngineStreams
from shoal.actors.messages import EngineId, HttpConfig, IngressId, IngressInfo, ModelCard
from shoal.kvstore.messages import StoreId

BACKLOG = 2048


class IngressActor:
    """A new id each time the process starts: the engines drop what an earlier one had asked for."""

    def __init__(self, model: ModelCard, http: HttpConfig) -> None:
        self._model = model
        self._http = http
        self._ingress_id = IngressId(f"ingress-{uuid.uuid4().hex[:8]}")
        self._streams = EngineStreams(self._ingress_id, model.block_size)
        self._starting: asyncio.Task[IngressInfo] | None = None
        self._serving: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Ingress({self._http.host}:{self._http.port})"

    async def start(self) -> IngressInfo:
        """Listen; raises ValueError when the address cannot be had. Asked again, it is the same start."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> IngressInfo:
        # transformers takes seconds to import: not while Ray waits for the class
        from shoal.actors.ingress.app import create_app  # noqa: PLC0415
        from shoal.actors.ingress.text import TextCodec  # noqa: PLC0415

        listener = listen(self._http)
        codec = await asyncio.to_thread(TextCodec.load, self._model.checkpoint)
        app = create_app(model=self._model, codec=codec, dispatcher=self._streams, api_key=self._http.api_key)
        self._intake, self._gate = app.state.intake, app.state.gate
        self._sequence_slots = app.state.sequence_slots
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        host, port = self._http.host, listener.getsockname()[1]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        settle()
        return IngressInfo(ingress_id=self._ingress_id, url=url)

    async def introduce(
        self, router: Any, engines: Mapping[EngineId, Any], stores: Mapping[StoreId, Any], fingerprint: bytes
    ) -> None:
        """`fingerprint` is the engines'; empty while none is ready, and prompts then have no block keys."""
        if fingerprint:
            self._intake.learn_fingerprint(fingerprint)
        self._sequence_slots.set(len(engines) * self._model.max_num_seqs)
        await self._streams.introduce(router, engines, stores, fingerprint)

    async def ping(self) -> None:
        """Answers while the event loop turns; raises when the server has ended."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new; open requests may go on for grace_s, and are then answered that they cannot."""
        if self._serving is not None:
            self._gate.close(grace_s)
            self._server.config.timeout_graceful_shutdown = math.ceil(grace_s) + 1
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=grace_s + 2)


def listen(http: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    # The protocol must be named: for others asyncio leaves Nagle's algorithm on, and the body of an answer
    # then waits 40 ms for the client to acknowledge its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((http.host, http.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        flag = "--port" if error.errno == errno.EADDRINUSE else "--host"
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen on {http.host}:{http.port}: {reason}; choose {flag}") from error
    listener.setblocking(False)
    return listener
