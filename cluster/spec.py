"""What a cluster is to be: the whole of it, frozen, so that a restarted supervisor needs nothing else."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import DeploymentId, HttpConfig, ModelCard
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.autoscaler import MAX_ENGINES, AutoscalingConfig
from shoal.cluster.watch import START_TIMEOUT_S

MAX_SLUG = 32
"""Of a model's name, in the names of its actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """A model, and how its engines are to compute it.

    Whatever changes an engine makes another deployment of it, by its id: so a cluster that is told the same
    again has nothing to do, and one that is told something else knows what is to be replaced.
    """

    model: ModelCard
    engine: EngineConfig
    routing_policy: RoutingPolicyName = "cost"
    labels: Mapping[str, str] = field(default_factory=dict)
    """What a node must be labelled with to host its engines, such as `ray.io/accelerator-type`."""
    num_engines: int = 1
    """To begin with, if it scales itself."""
    autoscaling: AutoscalingConfig | None = None
    start_timeout_s: float = START_TIMEOUT_S
    """How long an engine may take to get its model and to load it, from when a node has taken it in."""

    def __post_init__(self) -> None:
        if self.num_engines < 0:
            raise ValueError(f"--engines must be at least 0, got {self.num_engines}")
        if self.num_engines > MAX_ENGINES:
            raise ValueError(f"--engines must be at most {MAX_ENGINES}, got {self.num_engines}")
        if self.start_timeout_s <= 0:
            raise ValueError(f"--start-timeout must be above 0, got {self.start_timeout_s:g}")

    @property
    def deployment_id(self) -> DeploymentId:
        """A readable name and a digest of all that its engines are made by; not of how many there are, nor
        of how long they may take."""
        made_by = (self.model, self.engine, self.routing_policy, sorted(self.labels.items()))
        digest = hashlib.sha256(repr(made_by).encode()).hexdigest()[:6]
        slug = re.sub(r"[^a-z0-9]+", "-", self.model.name.lower()).strip("-")[:MAX_SLUG].strip("-")
        return DeploymentId(f"{slug or 'model'}.{digest}")

    def scaled(self, num_engines: int) -> "DeploymentSpec":
        return replace(self, num_engines=num_engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    name: str
    deployments: tuple[DeploymentSpec, ...]
    """One a model: all that are served under one name take each other's place."""
    kv_store_bytes: int | None
    """Host memory for prefixes, of each node with engines. None: a share of its object store; 0: none."""
    http: tuple[HttpConfig, ...]
    """Where each ingress listens, if they are counted."""
    ingress_labels: Mapping[str, str] = field(default_factory=dict)
    """If there are any, one ingress on each node that is labelled so, all as `http[0]` says."""
    stop_grace_s: float = 3.0
    """How long open streams may go on when the cluster is stopped."""
    drain_s: float = 120.0
    """How long an engine that is to go may finish what it has; what is left then goes on elsewhere."""
    is_detached: bool = False
    """Whether it outlives whoever started it."""

    def __post_init__(self) -> None:
        names = Counter(deployment.model.name for deployment in self.deployments)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"two models are served as {twice[0]!r}: give one another --served-model-name")
        if not self.deployments:
            raise ValueError("models: there must be at least one")
        if not self.http:
            raise ValueError("--ingresses must be at least 1")

    @property
    def labels(self) -> dict[str, str]:
        """Of the metrics of every process."""
        return {"shoal_cluster": self.name}

    @property
    def namespace(self) -> str:
        return namespace_of(self.name)


def namespace_of(name: str) -> str:
    """The Ray namespace in which a cluster's actors have their names."""
    return f"shoal-{name}"


def short(node: str) -> str:
    """Of a node's id, what it is called by here. How ids end differs even where somebody has chosen them."""
    return node[-8:]
