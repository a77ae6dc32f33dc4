"""The ingress's process: an HTTP server beside a dispatcher for each model, on one event loop."""

import asyncio
import errno
import logging
import math
import socket
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from shoal.actors.checkpoint_files import Fetch, as_it_is
from shoal.actors.ingress.interpreter import settle
from shoal.actors.ingress.loads import Loads
from shoal.actors.ingress.metrics import Metrics as IngressMetrics
from shoal.actors.ingress.streams import EngineStreams
from shoal.actors.messages import (
    DeploymentCard,
    DeploymentId,
    EngineId,
    HttpConfig,
    IngressAccount,
    IngressId,
    IngressInfo,
)
from shoal.kvstore.messages import StoreId
from shoal.kvstore.metrics import METRICS_INTERVAL_S, NO_LABELS, Labels, Metrics, name_for_people

logger = logging.getLogger(__name__)

BACKLOG = 2048

LISTEN_AFTER_S = 10.0
"""One that takes another's place waits no longer for tokenizers: those that have been read are served."""


class IngressActor:
    """A new id each time the process starts: the engines drop what an earlier one had asked for."""

    def __init__(
        self,
        http: HttpConfig,
        models: Sequence[DeploymentCard],
        labels: Labels = NO_LABELS,
        fetch: Fetch = as_it_is,
        is_first: bool = True,
    ) -> None:
        """models: whose tokenizers are read before it listens; it may be told of others later.

        labels: of its metrics. fetch: from a card's checkpoint to a folder of this node, which need not have
        weights. is_first: of its cluster; then a tokenizer that cannot be read is an error of the start.
        Later it costs that model alone.
        """
        self._labels = labels
        self._http = http
        self._fetch = fetch
        self._cards = models
        self._ingress_id = IngressId(f"ingress-{uuid.uuid4().hex[:8]}")
        self._streams: dict[DeploymentId, EngineStreams] = {}
        self._is_first = is_first
        self._loads = Loads(self._load)
        self._starting: asyncio.Task[IngressInfo] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return name_for_people(f"{self._ingress_id} at {self._http.host}:{self._http.port}", self._labels)

    async def start(self) -> IngressInfo:
        """Listen; raises ValueError when the address cannot be had. Asked again, it is the same start."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> IngressInfo:
        # transformers takes seconds to import: not while Ray waits for the class
        from shoal.actors.ingress.app import create_app  # noqa: PLC0415
        from shoal.actors.ingress.connections import server_of  # noqa: PLC0415
        from shoal.actors.ingress.door_files import DoorFiles  # noqa: PLC0415
        from shoal.actors.ingress.models import Models  # noqa: PLC0415
        from shoal.actors.ingress.remote_cluster import RemoteCluster  # noqa: PLC0415

        files = DoorFiles(self._http, time.monotonic)
        listener = listen(self._http)
        self._models, self._cluster = Models(), RemoteCluster()
        self._models.expect(card.model.name for card in self._cards)
        for card in self._cards:
            self._loads.begin(card)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._is_first else LISTEN_AFTER_S):
                await self._loads.all_tried()
        if self._is_first and (failures := self._loads.failures):
            listener.close()
            raise next(iter(failures.values()))
        app = create_app(models=self._models, cluster=self._cluster, guard=files.guard)
        self._gate, self._metrics = app.state.gate, app.state.metrics
        self._server = server_of(app, None if files.tls is None else files.tls.context)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._following = asyncio.create_task(files.follow(app.state.metrics))
        self._telling = asyncio.create_task(self._publish_metrics(app.state.metrics))
        host, port = self._http.host, listener.getsockname()[1]
        scheme = "http" if files.tls is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        settle()
        node = ray.get_runtime_context().get_node_id()
        return IngressInfo(ingress_id=self._ingress_id, url=url, node=node)

    async def _load(self, card: DeploymentCard) -> None:
        from shoal.actors.ingress.models import ServedModel  # noqa: PLC0415
        from shoal.actors.ingress.text import TextCodec  # noqa: PLC0415

        folder = await asyncio.to_thread(self._fetch, card.model.checkpoint, logger.info)
        codec = await asyncio.to_thread(TextCodec.load, folder)
        name = f"{self._ingress_id}/{card.deployment_id}"
        siblings = partial(self._siblings, card)
        streams = EngineStreams(self._ingress_id, card.model.block_size, name, siblings)
        self._streams[card.deployment_id] = streams
        self._models.add(
            ServedModel(
                deployment_id=card.deployment_id,
                card=replace(card.model, checkpoint=folder),
                codec=codec,
                dispatcher=streams,
                weight=0,  # until it knows an engine
            )
        )

    def _siblings(self, card: DeploymentCard) -> list[EngineStreams]:
        """Of the same name, and for all that this one takes: its answers may be as long."""
        return [
            self._streams[model.deployment_id]
            for model in self._models
            if model.card.name == card.model.name and model.deployment_id != card.deployment_id
            if model.card.max_model_len >= card.model.max_model_len
        ]

    async def introduce(
        self,
        deployments: Sequence[tuple[DeploymentCard, Any, Mapping[EngineId, Any]]],
        stores: Mapping[StoreId, Any],
        supervisor: Any = None,
    ) -> IngressAccount:
        """These are all that are served now, each with its router, None if it is away, and its engines; the
        first is that of whoever names no model."""
        self._cluster.introduce(supervisor)
        self._models.expect(card.model.name for card, _, _ in deployments)
        known = {card.deployment_id for card, _, _ in deployments}
        self._loads.forget_others(known)
        for deployment_id in self._streams.keys() - known:
            self._models.remove(deployment_id)
            if streams := self._streams.pop(deployment_id, None):  # else we were told at the same time
                await streams.close()
        slots: Counter[str] = Counter()
        for card, router, engines in deployments:
            model = self._models.get(card.deployment_id)
            if model is None:
                self._loads.begin(card)
                continue
            model.weight = card.weight
            slots[card.model.name] += card.weight * card.model.max_num_seqs
            if card.model.fingerprint:
                model.intake.learn_fingerprint(card.model.fingerprint)
            await self._streams[card.deployment_id].introduce(
                router, engines, stores, card.model.fingerprint, card.draining
            )
        self._metrics.set_sequence_slots(slots)
        return IngressAccount(
            can_place=frozenset(model.deployment_id for model in self._models if model.dispatcher.ready()),
            unread=self._loads.reasons,
        )

    async def ping(self) -> None:
        """Answers while the event loop turns; raises when the server has ended."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server has ended")
        if self._following is not None and self._following.done():
            raise RuntimeError("nobody follows the files of keys and certificates any more")

    async def _publish_metrics(self, counted: IngressMetrics) -> None:
        metrics = Metrics(self._ingress_id, self._labels)
        while True:
            metrics.tell(counted.families())
            await asyncio.sleep(METRICS_INTERVAL_S)

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
