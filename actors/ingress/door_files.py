"""What of a front door's configuration lies in files: keys and certificate, followed as they change."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.keys import DEFAULT_TENANT, KeyEntry, KeyRing, read_keys
from shoal.actors.ingress.metrics import Metrics
from shoal.actors.ingress.reload import Reload
from shoal.actors.ingress.tls import ServerTls, TlsFiles
from shoal.actors.messages import HttpConfig

POLL_S = 1.0


class DoorFiles:
    def __init__(self, http: HttpConfig, clock: Callable[[], float]) -> None:
        """Reads them. Raises ValueError with a line that names the flag and the file."""
        self._reloads: list[Reload] = []
        self.guard = Guard(clock, keys=self._keys(http, clock), admin_key_hash=http.admin_key_hash)
        self.tls = self._tls(http)

    def _keys(self, http: HttpConfig, clock: Callable[[], float]) -> KeyRing | None:
        if http.api_key_hash is None and http.api_keys is None:
            return None
        always = [KeyEntry(name=DEFAULT_TENANT, hash=http.api_key_hash)] if http.api_key_hash else []
        keys = KeyRing(clock, always=always)
        if http.api_keys is not None:
            path = Path(http.api_keys)
            self._follow(Reload("api_keys", [path], read=partial(read_keys, path), use=keys.replace))
        return keys

    def _tls(self, http: HttpConfig) -> ServerTls | None:
        files = TlsFiles.of(http.ssl_certfile, http.ssl_keyfile)
        if files is None:
            return None
        tls = ServerTls()
        self._follow(Reload("certificate", files.paths, read=files.load, use=tls.show))
        return tls

    def _follow(self, reload: Reload) -> None:
        reload.load()
        self._reloads.append(reload)

    async def follow(self, metrics: Metrics) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.look_again(metrics)

    async def look_again(self, metrics: Metrics) -> None:
        for reload in self._reloads:
            await reload.look_again(metrics)
