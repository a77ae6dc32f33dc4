"""How an engine's memory is divided, in the order that fixes each part before the next.

    weights | a step's peak | state slots and their staging | paged blocks from what is left

The first three follow from the model and the limits; only the number of blocks is chosen.
"""

from dataclasses import dataclass

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
    block_bytes: int
    block_size: int
    """Tokens a block."""
    num_blocks: int
    """Block 0, never issued, included."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose K/V rows fit."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self) -> str:
        return (
            f"memory {format_size(self.total_bytes)} = weights {format_size(self.weights_bytes)} "
            f"+ step {format_size(self.step_peak_bytes)} + state {format_size(self.state_bytes)} "
            f"+ {self.num_blocks} blocks of {format_size(self.block_bytes)} ({self.num_tokens:,} tokens)"
        )


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
    max_num_seqs: int,
    max_model_len: int,
) -> MemoryPlan:
    """Divide total_bytes: blocks are what is left, since prefixes may fill them all.

    One sequence of max_model_len must fit, else NotEnoughMemory.
    """
    # Doubled for the staging buffer that a slot's copies pass through.
    state_bytes = 2 * state_bytes_per_slot * num_state_slots(max_num_seqs) if state_bytes_per_slot else 0
    left = total_bytes - weights_bytes - step_peak_bytes - state_bytes
    blocks_per_sequence = -(-max_model_len // block_size)
    affordable = max(0, left // block_bytes)
    if affordable < blocks_per_sequence + 1:
        needed = total_bytes - left + (blocks_per_sequence + 1) * block_bytes
        size = format_size
        raise NotEnoughMemory(
            f"not enough memory: one sequence of max_model_len {max_model_len} needs {blocks_per_sequence} "
            f"KV blocks of {size(block_bytes)} and one spare; of {size(total_bytes)}, after weights "
            f"{size(weights_bytes)}, step {size(step_peak_bytes)} and state {size(state_bytes)}, "
            f"{size(max(0, left))} is left, which is {affordable} blocks. Give --memory at least "
            f"{size(needed, up=True)}" + _or_shorter(affordable, block_size)
        )
    return MemoryPlan(
        total_bytes=total_bytes,
        weights_bytes=weights_bytes,
        step_peak_bytes=step_peak_bytes,
        state_bytes=state_bytes,
        block_bytes=block_bytes,
        block_size=block_size,
        num_blocks=affordable,
    )


def _or_shorter(affordable: int, block_size: int) -> str:
    if affordable < 2:
        return "."
    return f", or lower --max-model-len to {(affordable - 1) * block_size}."
