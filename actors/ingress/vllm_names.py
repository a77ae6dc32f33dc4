"""An ingress's numbers by vLLM's names for such, for dashboards and scalers that were made for it.

Made when they are asked for, of what is counted anyway. Ray's metrics have none of them: a colon is not for
their names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric

from shoal.actors.messages import DraftCounts, EngineId, EngineLoad

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
_DRAFTS: tuple[tuple[str, str, Callable[[DraftCounts], int]], ...] = (
    ("num_drafts", "Runs of guessed tokens.", lambda drafts: drafts.num_drafts),
    ("num_draft_tokens", "Tokens guessed.", lambda drafts: drafts.num_tokens),
    ("num_accepted_tokens", "Those that were right.", lambda drafts: drafts.num_accepted),
)
_LABELS = {"reason": "finished_reason"}


class VllmNames:
    """Every series is of one model. Those of engines say which, and count this ingress's requests there: a
    sum over ingresses counts each once."""

    def __init__(
        self, families: Iterable[Metric], loads: Mapping[str, Mapping[EngineId, EngineLoad]]
    ) -> None:
        """families: with `model_name` in each series. loads: by model."""
        self._families = {family.name: family for family in families}
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        for ours, theirs in SAME:
            if ours in self._families:
                yield self._renamed(self._families[ours], theirs)
        if "shoal_prompt_tokens" in self._families:
            yield from self._hits()
        yield self._of_engines(
            "num_requests_running", "Requests that an engine computes.", lambda load: load.num_running
        )
        yield self._of_engines(
            "num_requests_waiting",
            "Requests that wait on an engine, for room or for a fetch.",
            lambda load: load.num_waiting,
        )
        yield self._of_engines(
            "kv_cache_usage_perc",
            "The share of an engine's blocks that sequences use; 1 is all.",
            lambda load: load.kv_usage,
        )

        yield from self._drafts()

    def _of_engines(self, name: str, description: str, value: Callable[[EngineLoad], float]) -> Metric:
        family = Metric(f"vllm:{name}", description, "gauge")
        for labels, load in self._labelled_loads():
            family.add_sample(family.name, labels, float(value(load)))
        return family

    def _drafts(self) -> Iterator[Metric]:
        """None where nobody drafts."""
        for name, description, value in _DRAFTS:
            family = Metric(f"vllm:spec_decode_{name}", description, "counter")
            for labels, load in self._labelled_loads():
                if load.drafts.num_drafts:
                    family.add_sample(f"{family.name}_total", labels, float(value(load.drafts)))
            if family.samples:
                yield family

    def _labelled_loads(self) -> Iterator[tuple[dict[str, str], EngineLoad]]:
        for model_name, engines in self._loads.items():
            for engine_id, load in engines.items():
                yield {"model_name": model_name, "engine": engine_id}, load

    def _hits(self) -> Iterator[Metric]:
        """What was not on the device was looked for in the stores: an external cache, to vLLM."""
        prompts, device = self._by_model("shoal_prompt_tokens"), self._found("device")
        own, other = self._found("own_store"), self._found("other_store")
        for name, description, values in (
            ("prefix_cache_queries", "Tokens of prompts.", prompts),
            ("prefix_cache_hits", "Those that were cached on the device.", device),
            (
                "external_prefix_cache_queries",
                "Those that were not.",
                {model: prompts[model] - device[model] for model in prompts},
            ),
            (
                "external_prefix_cache_hits",
                "Of these, those that stores had.",
                {model: own[model] + other[model] for model in prompts},
            ),
        ):
            family = Metric(f"vllm:{name}", description, "counter")
            for model_name, value in values.items():
                family.add_sample(f"{family.name}_total", {"model_name": model_name}, value)
            yield family

    def _found(self, place: str) -> dict[str, float]:
        return self._by_model("shoal_cached_prompt_tokens", place)

    def _by_model(self, name: str, place: str | None = None) -> dict[str, float]:
        samples = self._families[name].samples
        return {s.labels["model_name"]: s.value for s in samples if place in (None, s.labels.get("place"))}

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        return renamed
