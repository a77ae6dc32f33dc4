"""How an engine's memory is divided, in the order that fixes each part before the next.

    weights | a step's peak | state slots and their staging | paged blocks and segments from what is left

The first three follow from the model and the limits; only the numbers of blocks and segments are chosen.
"""

from dataclasses import dataclass, replace

from shoal.kvstore.sizes import format_size

STATE_SLOTS_PER_SEQUENCE = 1.2
"""More slots than running sequences: a slot can outlive its sequence by a copy (DeepInfer, section 4.3.1)."""


class NotEnoughMemory(ValueError):
    """The engine cannot start; the message has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    total_bytes: int
    weights_bytes: int
    step_peak_bytes: int
    """What a step of max_num_batched_tokens takes beyond weights and pools, measured."""
    state_bytes: int
    num_slots: int
    """As of blocks; 0 of a model without state."""
    block_bytes: int
    """0 where no layer is paged: blocks are then but numbers that segments are found by."""
    block_size: int
    """Tokens a block."""
    num_blocks: int
    """Block 0, never issued, included."""
    segment_bytes: int
    num_segments: int
    """As of blocks; 0 where nothing is kept in segments."""

    @property
    def left_bytes(self) -> int:
        """For blocks and segments."""
        return self.total_bytes - self.weights_bytes - self.step_peak_bytes - self.state_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens whose K/V rows fit."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self) -> str:
        segments = f" + {self.num_segments} segments of {format_size(self.segment_bytes)}"
        return (
            f"memory {format_size(self.total_bytes)} = weights {format_size(self.weights_bytes)} "
            f"+ step {format_size(self.step_peak_bytes)} + state {format_size(self.state_bytes)} "
            f"+ {self.num_blocks} blocks of {format_size(self.block_bytes)} ({self.num_tokens:,} tokens)"
        ) + (segments if self.num_segments else "")


def num_state_slots(max_num_seqs: int) -> int:
    """Slots to allocate, slot 0 included: floor(1.2 * max_num_seqs) can be issued."""
    return int(STATE_SLOTS_PER_SEQUENCE * max_num_seqs) + 1


def plan_memory(
    *,
    total_bytes: int,
    weights_bytes: int,
    step_peak_bytes: int,
    state_bytes_per_slot: int,
    block_bytes: int,
    block_size: int,
    segment_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
) -> MemoryPlan:
    """Divide total_bytes: blocks and segments are what is left, since prefixes may fill them all.

    One sequence of max_model_len must fit, else NotEnoughMemory.
    """
    num_slots = num_state_slots(max_num_seqs) if state_bytes_per_slot else 0
    plan = MemoryPlan(
        total_bytes=total_bytes,
        weights_bytes=weights_bytes,
        step_peak_bytes=step_peak_bytes,
        state_bytes=2 * state_bytes_per_slot * num_slots,  # doubled for the staging that copies pass through
        num_slots=num_slots,
        block_bytes=block_bytes,
        block_size=block_size,
        num_blocks=0,
        segment_bytes=segment_bytes,
        num_segments=0,
    )
    blocks_per_sequence = -(-max_model_len // block_size)
    least_bytes = (blocks_per_sequence + 1) * block_bytes + segment_bytes
    if plan.left_bytes < least_bytes:
        raise NotEnoughMemory(_refusal(plan, least_bytes, blocks_per_sequence, max_model_len))
    num_segments = _num_segments(plan, blocks_per_sequence + 1)
    if block_bytes:
        num_blocks = (plan.left_bytes - num_segments * segment_bytes) // block_bytes
    else:
        num_blocks = max(2 * max_num_seqs * blocks_per_sequence + 1, num_segments)
    return replace(plan, num_blocks=num_blocks, num_segments=num_segments)


def _num_segments(plan: MemoryPlan, least_blocks: int) -> int:
    """Half of what is left, but no more of them than of blocks, each of which has one at most."""
    left, block, segment = plan.left_bytes, plan.block_bytes, plan.segment_bytes
    if not segment:
        return 0
    if not block:
        return left // segment
    beside_least = (left - least_blocks * block) // segment
    return min(max(1, left // 2 // segment), max(1, left // (block + segment)), beside_least)


def _refusal(plan: MemoryPlan, least_bytes: int, blocks_per_sequence: int, max_model_len: int) -> str:
    size, wanted, instead = format_size, ["its state"] if plan.state_bytes else [], []
    left = f"{size(max(0, plan.left_bytes))} is left"
    if plan.block_bytes:
        affordable = max(0, plan.left_bytes - plan.segment_bytes) // plan.block_bytes
        wanted.append(f"{blocks_per_sequence} KV blocks of {size(plan.block_bytes)} and one spare")
        left += f", which is {affordable} blocks"
        instead += [f"--max-model-len to {(affordable - 1) * plan.block_size}"] if affordable > 1 else []
    if plan.state_bytes:
        instead.append("--max-num-seqs")
    return (
        f"not enough memory: one sequence of max_model_len {max_model_len} needs {', '.join(wanted)}; of "
        f"{size(plan.total_bytes)}, after weights {size(plan.weights_bytes)}, step "
        f"{size(plan.step_peak_bytes)} and state {size(plan.state_bytes)}, {left}. Give --memory at least "
        f"{size(plan.total_bytes - plan.left_bytes + least_bytes, up=True)}"
        + "".join(f", or lower {what}" for what in instead)
        + "."
    )
