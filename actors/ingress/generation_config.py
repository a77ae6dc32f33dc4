"""How a model wants to be sampled when a request does not say: its generation_config.json."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """In the units of `SamplingParams`; without a word from the model they are the API's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_IN_RANGE: dict[str, Callable[[float], bool]] = {
    "temperature": lambda t: t >= 0,
    "top_p": lambda p: 0 < p <= 1,
    "top_k": lambda k: 0 <= k < 2**31 and k == int(k),
    "min_p": lambda p: 0 <= p <= 1,
    "repetition_penalty": lambda r: r > 0,
}


def generation_defaults(checkpoint: str | Path) -> GenerationDefaults:
    """Values of the file, as far as it has them. Raises ValueError for one that nobody can sample by.

    `do_sample` is not asked: it says what transformers' generate does unasked, and many checkpoints leave it
    false beside the temperature that they were tuned for.
    """
    path = Path(checkpoint) / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        found = {name: said[name] for name in _IN_RANGE if said.get(name) is not None}
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is no generation config ({error}): download it again or remove it"
        ) from error
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not _IN_RANGE[name](value):
            raise ValueError(f"{path} says {name} {value!r}, which cannot be sampled by: mend or remove it")
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return GenerationDefaults(**found)
