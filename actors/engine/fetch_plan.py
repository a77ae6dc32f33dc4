"""What a prefix lacks on the device, and which store has it. Plain arithmetic over block indices."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shoal.actors.messages import PrefixSource, StoreId
from shoal.kvstore.boundary import BoundaryRule, Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Where each block of a prompt, and its segment, can be had."""

    blocks: dict[int, StoreId] = field(default_factory=dict)
    segments: dict[int, StoreId] = field(default_factory=dict)

    @classmethod
    def of(cls, sources: Iterable[PrefixSource], own: StoreId | None) -> "Offers":
        """The own node's store is asked for all that it has, then those that were named first."""
        offers = cls()
        for source in sorted(sources, key=lambda source: source.store_id != own):
            for i in range(source.first, source.end):
                offers.blocks.setdefault(i, source.store_id)
            for i in source.segments:
                offers.segments.setdefault(i, source.store_id)
        return offers

    def only(self, store_id: StoreId | None) -> "Offers":
        return Offers(
            blocks={i: store for i, store in self.blocks.items() if store == store_id},
            segments={i: store for i, store in self.segments.items() if store == store_id},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    resume: Resume
    """Where the prefix can be taken up when everything has come."""
    blocks: dict[int, StoreId]
    segments: dict[int, StoreId]


def plan_fetch(
    rule: BoundaryRule,
    offers: Offers,
    *,
    num_blocks: int,
    num_matched: int,
    has_segment: Callable[[int], bool],
) -> FetchPlan:
    """How to get furthest within the first num_blocks blocks, of which the device has num_matched.

    has_segment: whether the device has the segment of block i.
    """
    reach = num_matched
    while reach < num_blocks and reach in offers.blocks:
        reach += 1
    resume = rule.furthest(reach, lambda i: has_segment(i) or i in offers.segments)
    return FetchPlan(
        resume=resume,
        blocks={i: offers.blocks[i] for i in range(num_matched, resume.boundary)},
        segments={i: offers.segments[i] for i in rule.segments_at(resume.start) if not has_segment(i)},
    )
