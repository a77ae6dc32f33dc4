"""The YAML of a cluster. What is not said has the default of the flags, from `ServeOptions`.

Shape and names follow Ray Serve LLM's; `engine_kwargs` has the names of `shoal serve`'s flags, with _ for -.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.messages import HttpConfig
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.config.quantities import Duration, Size, SizeOrNone
from shoal.cluster.options import ServeOptions
from shoal.kvstore.layout import KVDtype

MAX_PORT = 65535
_DEFAULT = ServeOptions()

PositiveInt = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Path = Text
"""As the operating system resolves it: relative to where the command runs, not to the file that says it."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),  # model_id and model_source are Ray's names
    )


class TLS(Section):
    """Both are PEM files."""

    certificate: Path
    key: Path


class HTTP(Section):
    """Where and how the front doors listen."""

    host: Text = _DEFAULT.http.host
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=MAX_PORT)] = _DEFAULT.http.port
    """Port to listen on; 0 takes a free one."""
    ingresses: PositiveInt = _DEFAULT.ingresses
    """Front doors to run, on this port and those that follow it."""
    on_nodes: Annotated[dict[Text, str], Field(min_length=1)] | None = None
    """Instead: one front door on each Ray node with these labels, all on the same port."""
    tls: TLS | None = None
    """Speak HTTPS."""
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """Clients must send it as a bearer token. Better said by the environment, as SHOAL_API_KEY."""
    api_keys: Path | None = None
    """A file of hashed keys, each with its tenant and limits."""
    admin_key_hash: Text | None = None
    """Of the key that the admin endpoints ask for."""

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        if self.on_nodes is not None and "ingresses" in self.model_fields_set:
            raise ValueError("on_nodes has one front door a node: drop ingresses, or drop on_nodes")
        if self.port and self.port + self.ingresses - 1 > MAX_PORT:
            raise ValueError(
                f"port {self.port} leaves no room for {self.ingresses} ingresses: lower one of them"
            )
        return self

    def listener(self) -> HttpConfig:
        api_key = None if self.api_key is None else self.api_key.get_secret_value()
        return HttpConfig(host=self.host, port=self.port, api_key=api_key)


class KVStore(Section):
    memory: SizeOrNone | None = _DEFAULT.kv_store_bytes
    """Host memory of each node for prefixes; 0 is none. Not said: 30% of Ray's object store there."""


class EngineKwargs(Section):
    """Of each engine of a model."""

    threads: PositiveInt | None = _DEFAULT.threads
    """Not said: the cores, shared by the engines."""
    memory: Size | None = _DEFAULT.memory_bytes
    """Weights, state and KV blocks. Not said: 60% of what Ray has free, shared."""
    max_model_len: PositiveInt | None = _DEFAULT.max_model_len
    """Prompt and output together, in tokens. Not said: the model's own."""
    max_num_seqs: PositiveInt = _DEFAULT.max_num_seqs
    """Sequences that an engine runs at once."""
    max_num_batched_tokens: PositiveInt = _DEFAULT.max_num_batched_tokens
    """Tokens that one step computes."""
    max_queued_requests: Annotated[int, Field(ge=0)] = _DEFAULT.max_queued_requests
    """Requests that wait beside those that run; more are answered 503."""
    max_queued_tokens: Annotated[int, Field(ge=0)] = _DEFAULT.max_queued_tokens
    """Tokens of all that wait together; one that waits alone may."""
    block_size: PositiveInt = _DEFAULT.block_size
    """Tokens in a KV block, a multiple of 16."""
    prefix_cache: PrefixCacheName = _DEFAULT.prefix_cache
    kv_cache_dtype: KVDtype = _DEFAULT.kv_cache_dtype
    kv_write_policy: WritePolicy = _DEFAULT.kv_write_policy
    num_dropped_layers: Annotated[int, Field(ge=0)] = _DEFAULT.num_dropped_layers
    """The last sliding-window layers that are not stored but computed again after a hit."""
    require_kernels: bool = _DEFAULT.require_kernels
    """Refuse to start on the slow torch reference."""

    @model_validator(mode="after")
    def _an_engine_takes_them(self) -> Self:
        """What an engine would refuse. What it is given beside these is any that it takes."""
        own = self.model_dump(exclude={"threads", "memory", "max_model_len"})
        EngineConfig(checkpoint="", max_model_len=self.max_model_len or 2, memory_bytes=1, threads=1, **own)
        return self


class Autoscaling(Section):
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1

    @model_validator(mode="after")
    def _some_number_is_both(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}: raise it"
            )
        return self


class Model(Section):
    model_id: Text | None = _DEFAULT.served_model_name
    """The name that clients ask for. Not said: the source's."""
    model_source: Text | None = _DEFAULT.model
    """A directory, a .gguf file or a hub id (org/name). Not said: SmolLM2-135M-Instruct."""
    revision: Text | None = _DEFAULT.revision
    """Branch, tag or commit of a hub model."""
    accelerator_type: Text | None = None
    """Of the nodes that run its engines."""
    engine_kwargs: EngineKwargs = EngineKwargs()
    num_replicas: PositiveInt = _DEFAULT.engines
    """Engines to run."""
    autoscaling_config: Autoscaling | None = None
    """Instead of num_replicas: as many engines as there is work for."""

    @model_validator(mode="after")
    def _one_says_how_many(self) -> Self:
        if self.autoscaling_config is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                "num_replicas and autoscaling_config both say how many engines: drop one of them"
            )
        return self


class ClusterConfig(Section):
    """What a cluster is to be."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = _DEFAULT.name
    """Of this cluster within Ray."""
    address: Text | None = _DEFAULT.address
    """Ray cluster to join. Not said: RAY_ADDRESS, else a private local Ray."""
    lifetime: Literal["driver", "detached"] = "driver"
    """Whether the cluster ends with the process that started it, or runs on without."""
    stop_grace: Duration = _DEFAULT.stop_grace_s
    """How long open streams may go on when the cluster is stopped."""
    http: HTTP = HTTP()
    kv_store: KVStore = KVStore()
    routing_policy: RoutingPolicyName = _DEFAULT.routing_policy
    """How the router chooses an engine for a request."""
    models: Annotated[tuple[Model, ...], Field(strict=False, json_schema_extra={"minItems": 1})] = (Model(),)

    @model_validator(mode="after")
    def _there_are_models_and_their_names_differ(self) -> Self:
        if not self.models:
            raise ValueError("models must not be empty: say one, or leave it out")
        ids = [model.model_id or model.model_source for model in self.models]
        if twice := next((name for name in ids if ids.count(name) > 1), None):
            raise ValueError(f"two models are called {twice}: give each a model_id of its own")
        return self

    def options(self) -> ServeOptions:
        (model,) = self.models
        engine: dict[str, Any] = dict(model.engine_kwargs)
        return ServeOptions(
            model=model.model_source,
            revision=model.revision,
            served_model_name=model.model_id,
            engines=model.num_replicas,
            ingresses=self.http.ingresses,
            memory_bytes=engine.pop("memory"),
            kv_store_bytes=self.kv_store.memory,
            routing_policy=self.routing_policy,
            http=self.http.listener(),
            stop_grace_s=self.stop_grace,
            address=self.address,
            name=self.name,
            **engine,
        )
