// What moves between a step's own rows, the rings of its sequences' slots and the segments that are kept of them. Copies
// only: the bits are those that `store` rounded.
#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "ops.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

class Mover {
public:
    Mover(const Ring& ring, const Rows& rows)
        : ring_(ring), rows_(rows), runs_(runs_of(rows)), ring_rows_(ring.slots.block_rows),
          segment_rows_(ring.segments.block_rows), size_(long(ring.slots.heads) * ring.slots.head_size),
          element_(ring.slots.is_bf16 ? 2 : 4) {}

    // Whether the step may read the piece's segment into its slot, or write it: what is named must exist.
    bool can_restore(const Piece& p) const { return fits(p) && p.boundary <= rows_.start[p.sequence]; }
    bool can_capture(const Piece& p) const {
        if (!fits(p)) return false;
        const long computed = p.boundary - rows_.start[p.sequence];
        return 0 < computed && computed <= runs_[p.sequence].rows;
    }

    // Rows of before what the ring holds at `start` are left out, so that pieces may come in any order.
    void restore(const Piece& p) const {
        const long first = p.boundary - segment_rows_, start = rows_.start[p.sequence];
        for_ring(p.sequence, std::max(first, start - ring_rows_), p.boundary, [&](Place ring, long position, long n) {
            copy(ring, at(ring_.segments, p.segment, position - first), n);
        });
    }

    void capture(const Piece& p) const {
        const long first = p.boundary - segment_rows_, start = rows_.start[p.sequence];
        for_ring(p.sequence, first, std::min<long>(p.boundary, start), [&](Place ring, long position, long n) {
            copy(at(ring_.segments, p.segment, position - first), ring, n);
        });
        const long computed = std::max(first, start);
        copy(at(ring_.segments, p.segment, computed - first), own(p.sequence, computed), p.boundary - computed);
    }

    void commit(long s) const {
        const long end = rows_.start[s] + runs_[s].rows;
        for_ring(s, std::max<long>(rows_.start[s], end - ring_rows_), end,
                 [&](Place ring, long position, long n) { copy(ring, own(s, position), n); });
    }

    long piece_size() const { return 2 * segment_rows_ * size_ + 1; }
    long commit_size() const { return 2 * size_ * (rows_.count / std::max(1L, rows_.sequences) + 1); }

private:
    struct Place {
        char *k, *v;
    };

    bool fits(const Piece& p) const {
        return 0 <= p.sequence && p.sequence < rows_.sequences && 0 <= p.segment && p.segment < ring_.segments.blocks &&
               p.boundary >= segment_rows_;
    }

    Place at(const Pool& pool, long block, long row) const {
        return {static_cast<char*>(pool.k) + (block * pool.k_stride + row * size_) * element_,
                static_cast<char*>(pool.v) + (block * pool.v_stride + row * size_) * element_};
    }

    Place own(long sequence, long position) const {
        const long at = (runs_[sequence].first + position - rows_.start[sequence]) * size_ * element_;
        return {static_cast<char*>(ring_.k) + at, static_cast<char*>(ring_.v) + at};
    }

    void copy(Place to, Place from, long rows) const {
        const size_t bytes = rows * size_ * element_;
        std::memcpy(to.k, from.k, bytes);
        std::memcpy(to.v, from.v, bytes);
    }

    // Calls f(place, position, rows) for the positions [from, end) of a slot's ring, so many as lie in one piece.
    template <class F> void for_ring(long sequence, long from, long end, const F& f) const {
        for (long n; from < end; from += n) {
            n = std::min(end - from, ring_rows_ - from % ring_rows_);
            f(at(ring_.slots, rows_.slot[sequence], from % ring_rows_), from, n);
        }
    }

    const Ring& ring_;
    const Rows& rows_;
    const std::vector<Run> runs_;
    const long ring_rows_, segment_rows_, size_, element_;
};

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;

SHOAL_EXPORT(shoal_restore)(const void* op, const Rows* rows, int threads) {
    const Ring& ring = *static_cast<const RingOp*>(op)->ring;
    if (!rows->num_restores) return 0;
    if (!rows->fit(ring)) return 1;
    const SHOAL_ISA::Mover mover(ring, *rows);
    const Piece* pieces = rows->restores;
    if (!std::all_of(pieces, pieces + rows->num_restores, [&](const Piece& p) { return mover.can_restore(p); }))
        return 1;
    parallel_rows(threads, rows->num_restores, mover.piece_size(), [&](long i) { mover.restore(pieces[i]); });
    return 0;
}

SHOAL_EXPORT(shoal_capture)(const void* op, const Rows* rows, int threads) {
    const Ring& ring = *static_cast<const RingOp*>(op)->ring;
    if (!rows->num_captures) return 0;
    if (!rows->fit(ring)) return 1;
    const SHOAL_ISA::Mover mover(ring, *rows);
    const Piece* pieces = rows->captures;
    if (!std::all_of(pieces, pieces + rows->num_captures, [&](const Piece& p) { return mover.can_capture(p); }))
        return 1;
    parallel_rows(threads, rows->num_captures, mover.piece_size(), [&](long i) { mover.capture(pieces[i]); });
    return 0;
}

SHOAL_EXPORT(shoal_commit)(const void* op, const Rows* rows, int threads) {
    const Ring& ring = *static_cast<const RingOp*>(op)->ring;
    if (!rows->fit(ring)) return 1;
    const SHOAL_ISA::Mover mover(ring, *rows);
    parallel_rows(threads, rows->sequences, mover.commit_size(), [&](long s) { mover.commit(s); });
    return 0;
}
