"""What a cluster is to be: the whole of it, frozen, so that a restarted supervisor needs nothing else."""

from dataclasses import dataclass

from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import HttpConfig, ModelCard
from shoal.actors.router.policies import RoutingPolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    name: str
    model: ModelCard
    engine: EngineConfig
    num_engines: int
    kv_store_bytes: int | None
    """Host memory for prefixes, of each node with engines. None: a share of its object store; 0: none."""
    http: tuple[HttpConfig, ...]
    """Where each ingress listens."""
    routing_policy: RoutingPolicyName = "cost"
    stop_grace_s: float
    """How long open streams may go on when the cluster is stopped."""

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ValueError(f"--engines must be at least 1, got {self.num_engines}")
        if not self.http:
            raise ValueError("--ingresses must be at least 1")

    @property
    def num_ingresses(self) -> int:
        return len(self.http)

    @property
    def namespace(self) -> str:
        """The Ray namespace in which the cluster's actors have their names."""
        return f"shoal-{self.name}"
