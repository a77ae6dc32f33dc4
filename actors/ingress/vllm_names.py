"""An ingress's numbers by vLLM's names for such, for dashboards and scalers that were made for it.

Made when they are asked for, of what is counted anyway. Ray's metrics have none of them: a colon is not for
their names.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric

from shoal.actors.messages import EngineId, EngineLoad

SAME = (
    ("shoal_prompt_tokens", "vllm:prompt_tokens"),
    ("shoal_completion_tokens", "vllm:generation_tokens"),
    ("shoal_choices_finished", "vllm:request_success"),
    ("shoal_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ("shoal_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    ("shoal_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    ("shoal_request_prompt_tokens", "vllm:request_prompt_tokens"),
    ("shoal_request_generation_tokens", "vllm:request_generation_tokens"),
)
_LABELS = {"reason": "finished_reason"}


class VllmNames:
    """Every series is of one model. Those of engines say which, and count this ingress's requests there: a
    sum over ingresses counts each once."""

    def __init__(
        self, families: Iterable[Metric], model_name: str, loads: Mapping[EngineId, EngineLoad]
    ) -> None:
        self._families = {family.name: family for family in families}
        self._model = {"model_name": model_name}
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        for ours, theirs in SAME:
            yield self._renamed(self._families[ours], theirs)
        yield from self._hits()
        for name, description, values in (
            (
                "num_requests_running",
                "Requests that an engine computes.",
                {engine_id: float(load.num_running) for engine_id, load in self._loads.items()},
            ),
            (
                "num_requests_waiting",
                "Requests that wait on an engine, for room or for a fetch.",
                {engine_id: float(load.num_waiting) for engine_id, load in self._loads.items()},
            ),
            (
                "kv_cache_usage_perc",
                "The share of an engine's blocks that sequences use; 1 is all.",
                {engine_id: load.kv_usage for engine_id, load in self._loads.items()},
            ),
        ):
            family = Metric(f"vllm:{name}", description, "gauge")
            for engine_id, value in values.items():
                family.add_sample(family.name, {**self._model, "engine": engine_id}, value)
            yield family

    def _hits(self) -> Iterator[Metric]:
        """What was not on the device was looked for in the stores: an external cache, to vLLM."""
        prompt = self._value("shoal_prompt_tokens")
        device, *stores = (
            self._value("shoal_cached_prompt_tokens", place)
            for place in ("device", "own_store", "other_store")
        )
        for name, description, value in (
            ("prefix_cache_queries", "Tokens of prompts.", prompt),
            ("prefix_cache_hits", "Those that were cached on the device.", device),
            ("external_prefix_cache_queries", "Those that were not.", prompt - device),
            ("external_prefix_cache_hits", "Of these, those that stores had.", sum(stores)),
        ):
            family = Metric(f"vllm:{name}", description, "counter")
            family.add_sample(f"{family.name}_total", self._model, value)
            yield family

    def _value(self, name: str, place: str | None = None) -> float:
        samples = self._families[name].samples
        return next(s.value for s in samples if place in (None, s.labels.get("place")))

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            suffix = sample.name.removeprefix(family.name)
            renamed.add_sample(name + suffix, {**self._model, **labels}, sample.value)
        return renamed
