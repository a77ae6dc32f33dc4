"""One attempt at one request, as its engine sees it."""

from dataclasses import dataclass, field

from shoal.actors.engine.pools import Holding
from shoal.actors.engine.step import SequenceId
from shoal.actors.messages import EngineRequest, FinishReason, IngressId


@dataclass(slots=True, eq=False)
class Sequence:
    """History, progress, and what it owns.

    0 ......... num_computed ......... len(tokens)
    rows in the pool   known, not computed
    """

    sequence_id: SequenceId
    request: EngineRequest
    reply_to: IngressId
    tokens: list[int] = field(init=False)
    """Prompt and output."""
    num_computed: int = 0
    holding: Holding = field(default_factory=Holding)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    def append(self, token: int) -> FinishReason | None:
        """Take a drawn token; why the sequence ends with it, if it does."""
        self.tokens.append(token)
        if token in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output >= self.request.max_tokens else None
