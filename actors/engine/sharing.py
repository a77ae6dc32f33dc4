"""What sequences take from the prefix cache, and what they give to it."""

from collections.abc import Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass

from shoal.actors.engine.block_pool import BlockId
from shoal.actors.engine.deferred_release import DeferredRelease
from shoal.actors.engine.pools import Holding, Pools
from shoal.actors.engine.prefix_cache import PrefixCache
from shoal.actors.engine.saves import Occasion, Saves
from shoal.actors.engine.sequence import Sequence
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.boundary import BoundaryRule, Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Where a prefix can be taken up with what is on the device."""

    num_matched: int
    """Blocks that are there; the state that goes with them may lie before the last."""
    resume: Resume
    blocks: list[BlockId]
    """Those before resume.boundary."""


def find_hit(cache: PrefixCache, rule: BoundaryRule, keys: Series[BlockKey]) -> Hit:
    """keys: of the blocks that may be skipped, from the first."""
    matched = cache.match(keys)
    resume = rule.furthest(len(matched), lambda i: keys[i] in cache.segments)
    return Hit(num_matched=len(matched), resume=resume, blocks=matched[: resume.boundary])


class Sharing:
    """Looks sequences' prefixes up, has their state captured, and caches both.

    Without state a hit ends wherever the cached blocks do. Sliding layers need segments beside them. These
    are captured at every boundary that a step comes past, as far as there are any to be had, and belong to
    the sequence until their block is cached.

    Whole states are large, and one of them is enough: with `snapshot_every` not 1 they are captured where
    somebody is likely to come back (the end of a prompt, a place where prompts part), at every so manieth
    boundary (0: at no others), and on the way through an output, of which only the last remains.
    """

    def __init__(
        self,
        pools: Pools,
        deferred: DeferredRelease,
        rule: BoundaryRule,
        saves: Saves,
        *,
        snapshot_every: int = 1,
    ) -> None:
        self._pools = pools
        self._cache = pools.prefix_cache
        self._deferred = deferred
        self._rule = rule
        self._saves = saves
        self._snapshot_every = snapshot_every

    def hit(self, sequence: Sequence) -> Hit:
        block_size = self._pools.block_size
        keys = sequence.block_keys(0, sequence.num_skippable // block_size, block_size)
        return find_hit(self._cache, self._rule, keys)

    def is_growing(self, sequence: Sequence, hit: Hit, running: Iterable[Sequence]) -> bool:
        """Whether a step that is planned, but not committed, computes the next block of it for another, or
        captures state from which more of it can be taken up."""
        block_size, matched = self._pools.block_size, hit.num_matched
        is_longer = matched < sequence.num_skippable // block_size
        if is_longer and any(self._computes(other, sequence, matched) for other in running):
            return True
        if self._snapshot_every == 1 or hit.resume.boundary == matched:
            return False
        return any(
            hit.resume.start <= i < matched and self._computes(other, sequence, i)
            for other in running
            for i in other.holding.segments
        )

    def _computes(self, other: Sequence, sequence: Sequence, i: int) -> bool:
        """Whether a step in flight computes this block of a sequence for another."""
        block_size = self._pools.block_size
        return (
            other.may_share
            and other.num_shared_blocks <= i < min(other.num_planned, len(other.tokens)) // block_size
            and other.block_keys(i, i + 1, block_size) == sequence.block_keys(i, i + 1, block_size)
        )

    def admit(self, sequence: Sequence, hit: Hit, *, first_step: int) -> None:
        """Give a sequence what it needs to run, and the cached prefix to build upon."""
        block_size, start = self._pools.block_size, hit.resume.start
        holding = self._pools.claim(len(sequence.tokens), hit=hit.blocks)
        first_token = self._rule.first_token(hit.resume, block_size)
        sequence.admit(holding, hit.resume, block_size, first_token=first_token, may_share=self._cache.keeps)
        state = [sequence.keys[i + 1] for i in self._rule.segments_at(start)]
        segments = self._cache.segments.lock(state)
        sequence.restore = tuple(segments)
        if segments:
            self._deferred.release(Holding(segments=dict(enumerate(segments))), after_step=first_step)
        sequence.segments_to_keep = self._segments_to_keep(sequence, hit.num_matched)
        for i in sequence.segments_to_keep:
            if i < hit.num_matched:
                self._cache.segments.keep(sequence.keys[i + 1])
        self._saves.note(Occasion.SEEN_AGAIN, sequence.keys[1 : hit.resume.boundary + 1], state)

    def first_token(self, sequence: Sequence) -> int:
        """The first that it has computed since it was last admitted, or is to."""
        return self._rule.first_token(sequence.resume, self._pools.block_size)

    def _segments_to_keep(self, sequence: Sequence, num_matched: int) -> frozenset[int]:
        """What is needed at the prompt's end, for whoever asks again, and where it leaves what others have
        computed, for the next to do so."""
        if not self._rule.num_segments:
            return frozenset()
        ends = {(sequence.num_prompt - 1) // self._pools.block_size, num_matched}
        return frozenset(i for end in ends for i in self._state_before(end))

    def _state_before(self, boundary: int) -> range:
        return self._rule.segments_at(max(0, boundary - self._rule.num_recomputed))

    def captures(self, sequence: Sequence, start: int, end: int) -> tuple[tuple[int, BlockId], ...]:
        """(boundary, segment) for what rows start, ..., end - 1 come past; the sequence owns the segments.

        If there are few to be had, boundaries to which somebody is likely to come back are served first, then
        the last ones. A boundary that only drafts had come past is come past again, with the same segment.
        """
        block_size, taken = self._pools.block_size, sequence.holding.segments
        passed = range(start // block_size, end // block_size)
        if not passed or not self._rule.num_segments or not sequence.may_share:
            return ()
        wanted = {i for i in passed if self._is_lasting(sequence, i)}
        if passed[-1] >= (sequence.num_prompt - 1) // block_size:
            wanted.add(passed[-1])  # where an output ends is known only when it has
        lacking = [i for i in wanted if i not in taken and not self._has_segment(sequence, i)]
        lacking.sort(key=lambda i: (i not in sequence.segments_to_keep, -i))
        for i in lacking:
            segment = self._pools.claim_segment()
            if segment is None:
                break
            taken[i] = segment
        return tuple(((i + 1) * block_size, taken[i]) for i in passed if i in taken)

    def _is_lasting(self, sequence: Sequence, block: int) -> bool:
        """Whether its segment is of use once there is a later one."""
        every = self._snapshot_every
        if every == 1 or block in sequence.segments_to_keep:
            return True
        return every > 0 and block in self._rule.segments_at((block // every + 1) * every)

    def _has_segment(self, sequence: Sequence, block: int) -> bool:
        """Whether it is cached already, as far as the block's tokens are known."""
        block_size = self._pools.block_size
        if (block + 1) * block_size > len(sequence.tokens):
            return False
        return sequence.block_keys(block, block + 1, block_size)[0] in self._cache.segments

    def share(self, sequence: Sequence) -> None:
        """Give the prefix cache the blocks that have become complete, and their segments.

        Where it has a block of the same content already, the sequence goes on with that one: so its table
        stays a path of the cache, and no content is held twice for long.
        """
        first, complete = sequence.num_shared_blocks, sequence.num_computed // self._pools.block_size
        if not sequence.may_share:
            return
        if first < complete:
            self._share_blocks(sequence, first, complete)
        if sequence.holding.segments:
            self._share_segments(sequence, complete)

    def _share_blocks(self, sequence: Sequence, first: int, complete: int) -> None:
        keys = sequence.block_keys(first, complete, self._pools.block_size)
        table = sequence.holding.block_table
        own = table[first:complete]
        kept = self._cache.insert(sequence.keys[first], keys, own)
        sequence.num_shared_blocks = complete
        self._saves.note(Occasion.CACHED, keys)
        if kept != own:
            table[first:complete] = kept
            sequence.holding.changed()
            duplicates = [block for block, other in zip(own, kept, strict=True) if block != other]
            self._deferred.release(Holding(block_table=duplicates), after_step=sequence.last_step)

    def _share_segments(self, sequence: Sequence, complete: int) -> None:
        captured = {i: s for i, s in sequence.holding.segments.items() if i < complete}
        for i, segment in captured.items():
            del sequence.holding.segments[i]
            key = sequence.keys[i + 1]
            self._cache.segments.attach(key, segment, kept=i in sequence.segments_to_keep)
            self._cache.segments.unlock([segment])  # no step uses it any more
            if self._is_lasting(sequence, i):
                self._saves.note(Occasion.CACHED, (), [key])
            else:
                self._replace_passing(sequence, key)

    def _replace_passing(self, sequence: Sequence, key: BlockKey) -> None:
        """It stays until there is a later one: for whoever goes on where the output ends, or is preempted."""
        if sequence.passing_state is not None:
            self._cache.segments.give_up(sequence.passing_state)
        sequence.passing_state = key

    def end_turn(self, sequence: Sequence) -> None:
        """Whoever goes on with the conversation begins where it has come to."""
        if sequence.may_share:
            path = sequence.keys[1 : sequence.num_shared_blocks + 1]
            state = [path[i] for i in self._state_before(len(path))]
            for key in state:
                self._cache.segments.keep(key)
            self._saves.note(Occasion.CACHED, (), state)
            self._saves.note(Occasion.TURN_ENDED, path, state)

    def stop(self, sequence: Sequence) -> None:
        """The cache has been reset: what a running sequence has computed must not be offered again."""
        sequence.may_share, sequence.is_outdated = False, True
        sequence.num_shared_blocks = 0
        captured, sequence.holding.segments = sequence.holding.segments, {}
        self._deferred.release(Holding(segments=captured), after_step=sequence.last_step)
