"""Which field of the YAML each flag of `shoal serve` is."""

from shoal.cluster.config.models import EngineKwargs

MODEL = "models[0]"
"""Flags are about one model."""

FIELD_OF = {
    "model": f"{MODEL}.model_source",
    "revision": f"{MODEL}.revision",
    "served_model_name": f"{MODEL}.model_id",
    "engines": f"{MODEL}.num_replicas",
    **{name: f"{MODEL}.engine_kwargs.{name}" for name in EngineKwargs.model_fields},
    "host": "http.host",
    "port": "http.port",
    "ingresses": "http.ingresses",
    "api_key": "http.api_key",
    "kv_store_memory": "kv_store.memory",
    "routing_policy": "routing_policy",
    "stop_grace": "stop_grace",
    "address": "address",
    "name": "name",
}
"""By the flag's name, with _ for -."""

FLAG_OF = {field: f"--{flag.replace('_', '-')}" for flag, field in FIELD_OF.items()} | {
    FIELD_OF["model"]: "MODEL"
}
