"""The supervisor, as the operator's door reaches it."""

from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError

from shoal.actors.ingress.errors import bad_request, no_answer
from shoal.kvstore.calls import within

SUPERVISOR_DEADLINE_S = 10.0


class RemoteCluster:
    """Implements `Cluster` over the supervisor's actor."""

    def __init__(self) -> None:
        self._supervisor: Any = None

    def introduce(self, supervisor: Any) -> None:
        self._supervisor = supervisor

    async def status(self) -> Mapping[str, Any]:
        status: Mapping[str, Any] = await self._ask("describe")
        return status

    async def change(self, method: str, *args: Any) -> None:
        await self._ask(method, *args)

    async def _ask(self, method: str, *args: Any) -> Any:
        if self._supervisor is None:
            raise no_answer(["the supervisor"])
        try:
            return await within(SUPERVISOR_DEADLINE_S, getattr(self._supervisor, method).remote(*args))
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise bad_request(str(error.cause)) from None
            raise
        except (RayError, TimeoutError):
            raise no_answer(["the supervisor"]) from None
