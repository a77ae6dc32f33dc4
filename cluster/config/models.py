"""The YAML of a cluster. What is not said has the default of the flags, from `ServeOptions`.

Shape and names follow Ray Serve LLM's; `engine_kwargs` has the names of `shoal serve`'s flags, with _ for -.
"""

import pathlib
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from shoal.actors.engine.config import EngineConfig
from shoal.actors.engine.drafts import Speculative
from shoal.actors.engine.prefix_cache import PrefixCacheName
from shoal.actors.engine.transfers import WritePolicy
from shoal.actors.ingress.keys import hash_of
from shoal.actors.messages import HttpConfig
from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.autoscaler import MAX_ENGINES, AutoscalingConfig
from shoal.cluster.config.quantities import Duration, Size, SizeOrNone
from shoal.cluster.options import MAX_PORT, ModelOptions, ServeOptions
from shoal.kvstore.layout import KVDtype

_DEFAULT, _MODEL, _SCALING = ServeOptions(), ModelOptions(), AutoscalingConfig()
ACCELERATOR_LABEL = "ray.io/accelerator-type"

PositiveInt = Annotated[int, Field(ge=1)]
Engines = Annotated[int, Field(ge=1, le=MAX_ENGINES)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def _is_said(secret: SecretStr) -> SecretStr:
    if not secret.get_secret_value().strip():
        raise ValueError("must not be empty: say it, or leave it out")
    return secret


Secret = Annotated[SecretStr, AfterValidator(_is_said)]
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
    """PEM files, read again when they change."""

    certificate: Path
    """With the chain that verifies it."""
    key: Path | None = None
    """Not said: in the certificate's file."""


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
    api_key: Secret | None = None
    """Clients must send it as a bearer token. Better said by the environment, as SHOAL_API_KEY."""
    api_keys: Path | None = None
    """A file of hashed keys, each with its tenant and limits."""
    admin_key: Secret | None = None
    """Operators must send it as a bearer token. Better said by the environment, as SHOAL_ADMIN_KEY."""
    admin_key_hash: Text | None = None
    """The same, as `shoal keys new` shows it."""

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        if self.on_nodes is not None and "ingresses" in self.model_fields_set:
            raise ValueError("on_nodes has one front door a node: drop ingresses, or drop on_nodes")
        if self.port and self.port + self.ingresses - 1 > MAX_PORT:
            raise ValueError(
                f"port {self.port} leaves no room for {self.ingresses} ingresses: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _one_says_who_operates(self) -> Self:
        if self.admin_key is not None and self.admin_key_hash is not None:
            raise ValueError("admin_key and admin_key_hash both say who operates it: drop one of them")
        return self

    def listener(self) -> HttpConfig:
        tls = self.tls
        return HttpConfig(
            host=self.host,
            port=self.port,
            api_key_hash=_hashed(self.api_key),
            api_keys=_absolute(self.api_keys),
            admin_key_hash=_hashed(self.admin_key) or self.admin_key_hash,
            ssl_certfile=None if tls is None else _absolute(tls.certificate),
            ssl_keyfile=None if tls is None else _absolute(tls.key),
        )


def _hashed(key: SecretStr | None) -> str | None:
    return None if key is None else hash_of(key.get_secret_value())


def _absolute(path: str | None) -> str | None:
    """For processes whose working directory is another. Links stay: they may be turned elsewhere later."""
    return None if path is None else str(pathlib.Path(path).absolute())


class KVStore(Section):
    memory: SizeOrNone | None = _DEFAULT.kv_store_bytes
    """Host memory of each node for prefixes; 0 is none. Not said: 30% of Ray's object store there."""


class EngineKwargs(Section):
    """Of each engine of a model."""

    threads: PositiveInt | None = _MODEL.threads
    """Not said: the cores, shared by the engines."""
    memory: Size | None = _MODEL.memory_bytes
    """Weights, state and KV blocks. Not said: 60% of what Ray has free, shared."""
    max_model_len: PositiveInt | None = _MODEL.max_model_len
    """Prompt and output together, in tokens. Not said: the model's own."""
    max_num_seqs: PositiveInt = _MODEL.max_num_seqs
    """Sequences that an engine runs at once."""
    max_num_batched_tokens: PositiveInt = _MODEL.max_num_batched_tokens
    """Tokens that one step computes."""
    max_queued_requests: Annotated[int, Field(ge=0)] = _MODEL.max_queued_requests
    """Requests that wait beside those that run; more are answered 503."""
    max_queued_tokens: Annotated[int, Field(ge=0)] = _MODEL.max_queued_tokens
    """Tokens of all that wait together; one that waits alone may."""
    block_size: PositiveInt = _MODEL.block_size
    """Tokens in a KV block, a multiple of 16."""
    prefix_cache: PrefixCacheName = _MODEL.prefix_cache
    kv_cache_dtype: KVDtype = _MODEL.kv_cache_dtype
    kv_write_policy: WritePolicy = _MODEL.kv_write_policy
    num_dropped_layers: Annotated[int, Field(ge=0)] = _MODEL.num_dropped_layers
    """The last sliding-window layers that are not stored but computed again after a hit."""
    state_snapshot_every: Annotated[int, Field(ge=0)] = _MODEL.state_snapshot_every
    """Blocks between kept states of recurrent layers, beside ends and partings; 0 keeps no others."""
    speculative: Speculative | None = _MODEL.speculative
    """Where drafts of the next tokens come from. Not said: there are none."""
    num_draft_tokens: PositiveInt = _MODEL.num_draft_tokens
    """The most that a step verifies of a sequence."""
    require_kernels: bool = _MODEL.require_kernels
    """Refuse to start on the slow torch reference."""

    @model_validator(mode="after")
    def _drafts_come_from_somewhere(self) -> Self:
        if self.speculative is None and self.num_draft_tokens != _MODEL.num_draft_tokens:
            raise ValueError("num_draft_tokens without speculative drafts nothing: say speculative: ngram")
        return self

    @model_validator(mode="after")
    def _an_engine_takes_them(self) -> Self:
        """What an engine would refuse. What it is given beside these is any that it takes."""
        own = self.model_dump(exclude={"threads", "memory", "max_model_len"})
        EngineConfig(checkpoint="", max_model_len=self.max_model_len or 2, memory_bytes=1, threads=1, **own)
        return self


class Autoscaling(Section):
    min_replicas: Engines = _SCALING.min_replicas
    max_replicas: Engines = _SCALING.max_replicas
    target_ongoing_requests: Positive = _SCALING.target_ongoing_requests
    """Requests on an engine, running and waiting, on average."""
    target_ttft_s: Positive = _SCALING.target_ttft_s
    """So long the prompts that stand on an engine may take it."""
    upscale_delay_s: NotNegative = _SCALING.upscale_delay_s
    """So long more engines must be needed before there are more."""
    downscale_delay_s: NotNegative = _SCALING.downscale_delay_s
    """So long fewer must suffice before there are fewer."""

    @model_validator(mode="after")
    def _some_number_is_both(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}: raise it"
            )
        return self


class Model(Section):
    model_id: Text | None = _MODEL.served_model_name
    """The name that clients ask for. Not said: the source's."""
    model_source: Text | None = _MODEL.model
    """A directory, a .gguf file, a hub id (org/name), s3:// or gs://. Not said: SmolLM2-135M-Instruct."""
    revision: Text | None = _MODEL.revision
    """Branch, tag or commit of a hub model."""
    accelerator_type: Text | None = None
    """Of the nodes that run its engines."""
    node_labels: dict[Text, str] = {}
    """What a Ray node must be labelled with to run its engines."""
    engine_kwargs: EngineKwargs = EngineKwargs()
    num_replicas: Engines = _MODEL.engines
    """Engines to run."""
    autoscaling_config: Autoscaling | None = None
    """As many engines as there is work for; num_replicas is how many there are to begin with."""
    start_timeout: Duration = _MODEL.start_timeout_s
    """How long an engine may take to get the model and to load it."""

    def options(self) -> ModelOptions:
        engine: dict[str, Any] = dict(self.engine_kwargs)
        scaling = self.autoscaling_config
        accelerator = {ACCELERATOR_LABEL: self.accelerator_type} if self.accelerator_type else {}
        return ModelOptions(
            model=self.model_source,
            revision=self.revision,
            served_model_name=self.model_id,
            engines=self.num_replicas,
            autoscaling=None if scaling is None else AutoscalingConfig(**dict(scaling)),
            node_labels={**self.node_labels, **accelerator},
            start_timeout_s=self.start_timeout,
            memory_bytes=engine.pop("memory"),
            **engine,
        )


class ClusterConfig(Section):
    """What a cluster is to be."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = _DEFAULT.name
    """Of this cluster within Ray."""
    address: Text | None = _DEFAULT.address
    """Ray cluster to join. Not said: RAY_ADDRESS, else a private local Ray."""
    detached: bool = _DEFAULT.is_detached
    """Whether the cluster runs on without the process that started it; one that runs already becomes this."""
    stop_grace: Duration = _DEFAULT.stop_grace_s
    """How long open streams may go on when the cluster is stopped."""
    drain_timeout: Duration = _DEFAULT.drain_s
    """How long an engine that goes may take to finish what it has; what is left goes on elsewhere."""
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
        return ServeOptions(
            models=tuple(model.options() for model in self.models),
            ingresses=self.http.ingresses,
            ingress_labels=self.http.on_nodes or {},
            http=self.http.listener(),
            kv_store_bytes=self.kv_store.memory,
            routing_policy=self.routing_policy,
            address=self.address,
            name=self.name,
            is_detached=self.detached,
            stop_grace_s=self.stop_grace,
            drain_s=self.drain_timeout,
        )
