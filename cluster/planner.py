"""`shoal plan`: what a model's sequences take, and how many fit, from its config.json alone."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.actors.engine.memory_plan import MemoryPlan, NotEnoughMemory, num_state_slots, plan_memory
from shoal.actors.engine.models.decoder_config import load_config, longest_length, usual_length
from shoal.cluster.console import PLAIN
from shoal.cluster.footprint import Footprint, Limits, check_architecture, footprint
from shoal.kvstore.layout import RowDtype
from shoal.kvstore.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the command line says; None is "choose for me"."""

    memory_bytes: int | None = None
    """Beside weights and a step's peak."""
    max_model_len: int | None = None
    max_num_seqs: int = 64
    block_size: int = 128
    kv_cache_dtype: RowDtype | None = None
    num_dropped_layers: int = 0
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    limits: Limits
    footprint: Footprint
    weights_bytes: int | None
    """Of the files beside the config, if they are there."""
    memory_bytes: int | None
    """Beside weights and a step; None if it was not said."""
    memory: MemoryPlan | None
    """None if that is too little."""
    too_little: str | None
    """What is lacking, if so."""

    @property
    def bytes_per_token(self) -> float:
        return self.footprint.layout.bytes_per_token

    @property
    def usable_slots(self) -> int:
        return num_state_slots(self.limits.max_num_seqs) - 1 if self.footprint.layout.slots.num_bytes else 0

    @property
    def most_tokens(self) -> int | None:
        """Whose paged rows alone would fill the memory."""
        if self.memory_bytes is None or not self.footprint.layout.blocks.num_bytes:
            return None
        return self.memory_bytes * self.limits.block_size // self.footprint.layout.blocks.num_bytes

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        model, rings, memory = self.footprint, self.footprint.rings, self.memory
        return {
            "architecture": model.architecture,
            "served": model.is_served,
            "limits": asdict(self.limits) | {"dtype": model.dtype},
            "weights_bytes": self.weights_bytes,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_block": model.layout.blocks.num_bytes,
            "paged": [asdict(rows) | {"bytes_per_block": rows.bytes_per_block} for rows in model.paged],
            "bytes_per_slot": model.layout.slots.num_bytes,
            "bytes_per_segment": model.layout.segments.num_bytes,
            "rings": rings
            and asdict(rings)
            | {"bytes_per_layer": rings.bytes_per_layer, "stored_bytes": rings.stored_bytes},
            "states": [asdict(part) | {"num_layers": num_layers} for part, num_layers in model.states],
            "other_state_bytes": model.other_state_bytes,
            "segments_per_boundary": model.layout.rule.num_segments,
            "recomputed_tokens": model.layout.rule.recomputed_tokens(self.limits.block_size),
            "usable_slots": self.usable_slots,
            "memory_bytes": self.memory_bytes,
            "most_tokens": self.most_tokens,
            "too_little": self.too_little,
            "memory": memory
            and {
                "state_bytes": memory.state_bytes,
                "usable_blocks": memory.num_blocks - 1,
                "usable_segments": max(0, memory.num_segments - 1),
                "tokens": memory.num_tokens,
            },
        }


def make_plan(source: Path, options: PlanOptions) -> Plan:
    """source: a config.json or the directory that has one.

    Raises ValueError (UnsupportedModel) with a line for the operator.
    """
    hf = load_config(source)
    check_architecture(hf)
    longest = longest_length(hf)
    max_model_len = options.max_model_len or usual_length(hf)
    if max_model_len > longest:
        raise ValueError(f"--max-model-len {max_model_len} must be from 1 to the model's own {longest}")
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        dtype=options.kv_cache_dtype,
        num_dropped_layers=options.num_dropped_layers,
        num_draft_tokens=options.num_draft_tokens,
    )
    model = footprint(hf, limits)
    memory, too_little = None, None
    try:
        if options.memory_bytes is not None:
            memory = _divide(options.memory_bytes, model, limits)
    except NotEnoughMemory as error:
        too_little = str(error)
    return Plan(
        limits=limits,
        footprint=model,
        weights_bytes=_weights_bytes(source),
        memory_bytes=options.memory_bytes,
        memory=memory,
        too_little=too_little,
    )


def _divide(total_bytes: int, model: Footprint, limits: Limits) -> MemoryPlan:
    return plan_memory(
        total_bytes=total_bytes,
        weights_bytes=0,
        step_peak_bytes=0,
        state_bytes_per_slot=model.layout.slots.num_bytes,
        block_bytes=model.layout.blocks.num_bytes,
        block_size=limits.block_size,
        segment_bytes=model.layout.segments.num_bytes,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )


def _weights_bytes(source: Path) -> int | None:
    files = list(source.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) if files else None


def show(plan: Plan, console: Console) -> None:
    model = plan.footprint
    table = Table(title=_title(plan), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for what, number, note in _rows(plan):
        table.add_row(what, number, note)
    console.print(table)
    if not model.is_served:
        console.print(f"{model.architecture} can be planned, but not served yet.", **PLAIN)
    if plan.too_little:
        console.print(plan.too_little, **PLAIN)
    elif plan.memory is None:
        console.print("Say --memory SIZE to see what fits beside the weights and a step.", **PLAIN)


def _title(plan: Plan) -> str:
    return (
        f"{plan.footprint.architecture}: rows in {plan.footprint.dtype}, blocks of {plan.limits.block_size} "
        f"tokens, {plan.limits.max_num_seqs} sequences of up to {plan.limits.max_model_len:,} tokens"
    )


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    model, limits, rings = plan.footprint, plan.limits, plan.footprint.rings
    if plan.weights_bytes is not None:
        yield "weights", _bytes(plan.weights_bytes), "as they are stored"
    yield "a token", _bytes(plan.bytes_per_token), "in blocks"
    yield "a block", _bytes(model.layout.blocks.num_bytes), ""
    for rows in model.paged:
        note = f"{rows.num_layers} layers × {rows.rows_per_block} rows × {rows.bytes_per_row:,} B"
        yield f"  {rows.what}", _bytes(rows.bytes_per_block), note
    slots, segments = model.layout.slots, model.layout.segments
    yield "a state slot", _bytes(slots.num_bytes), "" if slots.num_bytes else "all rows are in blocks"
    if rings:
        note = f"{rings.num_rows} rows × {rings.bytes_per_row:,} B, window {rings.window}"
        yield "  a layer's ring", _bytes(rings.bytes_per_layer), note
        yield "  stored", _bytes(rings.stored_bytes), f"{rings.num_stored} of {rings.num_layers} layers"
    saved = {placed.part.name for placed in segments.parts}
    for part, num_layers in model.states:
        shape = " × ".join(map(str, part.shape))
        note = f"{num_layers} layers × {shape} {part.dtype}" + (", never stored" * (part.name not in saved))
        yield f"  {part.name}", _bytes(num_layers * part.num_bytes), note
    if segments.num_bytes:
        several = model.layout.rule.num_segments
        note = "one is the state at a boundary" if several == 1 else f"{several} are the state at a boundary"
        yield "a segment", _bytes(segments.num_bytes), note
    recomputed = model.layout.rule.recomputed_tokens(limits.block_size)
    if recomputed:
        yield "recomputed", f"{recomputed:,} tokens", "after a hit, for what is not stored"
    if plan.memory_bytes is not None:
        yield "", "", ""
        yield "memory", _bytes(plan.memory_bytes), "beside weights and a step"
        if plan.most_tokens is not None:
            yield "  at most", f"{plan.most_tokens:,} tokens", "if there were nothing but rows in blocks"
    if plan.memory is not None:
        yield from _memory_rows(plan, plan.memory)


def _memory_rows(plan: Plan, memory: MemoryPlan) -> Iterator[tuple[str, str, str]]:
    """In the order in which they are taken."""
    if plan.usable_slots:
        note = f"{plan.usable_slots} usable and one spare, and as much for their copies"
        yield "  state slots", _bytes(memory.state_bytes), note
    note = f"{memory.num_blocks - 1:,} usable and one spare: {memory.num_tokens:,} tokens"
    yield "  blocks", _bytes(memory.num_blocks * memory.block_bytes), note
    if memory.num_segments:
        note = f"{memory.num_segments - 1:,} usable and one spare"
        yield "  segments", _bytes(memory.num_segments * memory.segment_bytes), note


def _bytes(num_bytes: float) -> str:
    """Exactly, and as people read it."""
    exact = f"{num_bytes:,.15g} B"
    return exact if num_bytes < 1024 else f"{exact} ({format_size(int(num_bytes))})"
