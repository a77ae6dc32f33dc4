"""Which field of the YAML each flag of `shoal serve` is."""

from shoal.cluster.config.models import EngineKwargs

MODEL = "models[0]"
"""Flags are about one model."""
AUTOSCALING = f"{MODEL}.autoscaling_config"

FIELD_OF = {
    "model": f"{MODEL}.model_source",
    "revision": f"{MODEL}.revision",
    "start_timeout": f"{MODEL}.start_timeout",
    "served_model_name": f"{MODEL}.model_id",
    "engines": f"{MODEL}.num_replicas",
    **{name: f"{MODEL}.engine_kwargs.{name}" for name in EngineKwargs.model_fields},
    "host": "http.host",
    "port": "http.port",
    "ingresses": "http.ingresses",
    "api_key": "http.api_key",
    "api_keys": "http.api_keys",
    "admin_key": "http.admin_key",
    "ssl_certfile": "http.tls.certificate",
    "ssl_keyfile": "http.tls.key",
    "min_engines": f"{AUTOSCALING}.min_replicas",
    "max_engines": f"{AUTOSCALING}.max_replicas",
    "target_ongoing_requests": f"{AUTOSCALING}.target_ongoing_requests",
    "target_ttft": f"{AUTOSCALING}.target_ttft_s",
    "upscale_delay": f"{AUTOSCALING}.upscale_delay_s",
    "downscale_delay": f"{AUTOSCALING}.downscale_delay_s",
    "detached": "detached",
    "drain_timeout": "drain_timeout",
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
