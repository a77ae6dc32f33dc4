"""A runner without a model: K/V rows hold token IDs, so a wrong block shows up as a wrong token."""

from collections.abc import Sequence

from shoal.actors.engine.block_pool import NO_BLOCK
from shoal.actors.engine.step import StepPlan, StepResult

VOCABULARY = 1009
UNWRITTEN = -1


def next_token(tokens: Sequence[int]) -> int:
    """What follows a history: a function of every token in it, in order."""
    value = 7
    for token in tokens:
        value = (value * 31 + token) % VOCABULARY
    return value


def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request must get, whatever ran beside it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements the engine's `Runner`. Also checks each plan: no row is written twice or outside a table."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._rows = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        written: set[tuple[int, int]] = set()
        for sequence in plan.sequences:
            for position, token in enumerate(sequence.token_ids, sequence.start):
                row = self._locate(sequence.block_table, position)
                assert row not in written, f"two sequences write {row}"
                written.add(row)
                self._rows[row[0]][row[1]] = token
        tokens = {
            sequence.sequence_id: next_token(self._read(sequence.block_table, sequence.end))
            for sequence in plan.sequences
            if sequence.draw is not None
        }
        return StepResult(step_id=plan.step_id, tokens=tokens)

    def _locate(self, block_table: Sequence[int], position: int) -> tuple[int, int]:
        block = block_table[position // self._block_size]
        assert block != NO_BLOCK
        return block, position % self._block_size

    def _read(self, block_table: Sequence[int], num_tokens: int) -> list[int]:
        rows = (self._locate(block_table, position) for position in range(num_tokens))
        return [self._rows[block][offset] for block, offset in rows]
