"""Commands to a cluster that runs, over its own HTTP: they need no Ray."""

from typing import Any

import httpx

DEADLINE_S = 30.0


class AdminError(Exception):
    """The cluster does not answer, or says no; one line for the operator."""


class AdminClient:
    def __init__(self, url: str, key: str | None, *, verify: bool | str = True) -> None:
        """url: of an ingress. verify: as httpx takes it, for one that speaks TLS."""
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=DEADLINE_S, verify=verify)

    def close(self) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        return self._asked("GET", "status")

    def scale(self, engines: int, model: str | None) -> dict[str, Any]:
        return self._asked("POST", "scale", {"engines": engines, "model": model})

    def drain_node(self, node: str, *, undo: bool = False) -> dict[str, Any]:
        return self._asked("POST", "drain", {"node": node, "undo": undo})

    def drain_engine(self, engine: str) -> dict[str, Any]:
        return self._asked("POST", "drain", {"engine": engine})

    def stop(self) -> None:
        self._asked("POST", "stop", {})

    def answers(self) -> bool:
        """Whether anybody still listens there."""
        try:
            self._http.get(f"{self._url}/health")
        except httpx.TransportError:
            return False
        return True

    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        url = f"{self._url}/admin/{path}"
        try:
            response = self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise AdminError(f"no answer from {url} ({reason}): check --url") from error
        except httpx.InvalidURL as error:
            raise AdminError(f"--url {self._url}: {error}") from error
        try:
            said = response.json()
        except ValueError:
            raise AdminError(f"{url} is not a Shoal cluster (HTTP {response.status_code})") from None
        if response.is_success and isinstance(said, dict):
            return said
        error_said = said.get("error") if isinstance(said, dict) else None
        message = error_said.get("message") if isinstance(error_said, dict) else error_said
        raise AdminError(str(message or f"{url} answered HTTP {response.status_code}"))
