// Linear attention: instead of keys and values each head keeps one state, which every row of a sequence changes in turn.
// A column of it is nobody else's business, so columns are computed beside one another, each row after the other.
#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "ops.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

constexpr int WIDTH = 4;  // vectors of columns at a time: 32 KB of state for keys of 128

class Recurrence {
public:
    Recurrence(const RecurrenceOp& op, const Rows& rows)
        : op_(op), rows_(rows), runs_(runs_of(rows)), captures_(rows.sequences), group_(op.heads / op.key_heads),
          state_size_(long(op.key_size) * op.value_size) {}

    // Takes the step's captures; false if one names what does not exist.
    bool take_captures() {
        for (const Piece* p = rows_.captures; op_.segments && p != rows_.captures + rows_.num_captures; p++) {
            if (p->sequence < 0 || p->sequence >= rows_.sequences) return false;
            if (p->segment < 0 || p->segment >= op_.num_segments) return false;
            const long computed = long(p->boundary) - rows_.start[p->sequence];
            if (computed <= 0 || computed > runs_[p->sequence].rows) return false;
            captures_[p->sequence].push_back(*p);
        }
        for (auto& of_sequence : captures_)
            std::sort(of_sequence.begin(), of_sequence.end(),
                      [](const Piece& a, const Piece& b) { return a.boundary < b.boundary; });
        return true;
    }

    long blocks_per_head() const { return (op_.value_size + WIDTH * LANES - 1) / (WIDTH * LANES); }

    // Item i is a block of columns of a head of a sequence.
    void run(long i) const {
        const long column = i % blocks_per_head() * WIDTH * LANES, i_head = i / blocks_per_head();
        const long s = i_head / op_.heads, h = i_head % op_.heads;
        if (!runs_[s].rows) return;
        switch (std::min<long>(WIDTH, (op_.value_size - column) / LANES)) {
            case 1: return columns<1>(s, h, column);
            case 2: return columns<2>(s, h, column);
            case 3: return columns<3>(s, h, column);
            default: return columns<WIDTH>(s, h, column);
        }
    }

private:
    template <int N> void columns(long s, long h, long column) const {
        const long at = h * state_size_ + column;
        float* state = op_.slots + rows_.slot[s] * op_.slot_stride + at;
        if (rows_.start[s] == 0)
            for (long i = 0; i < op_.key_size; i++) std::fill_n(state + i * op_.value_size, N * LANES, 0.0f);
        const Piece* capture = captures_[s].data();
        const Piece* const end = capture + captures_[s].size();
        for (long t = runs_[s].first; t < runs_[s].first + runs_[s].rows; t++) {
            row<N>(state, t, h, column);
            for (; capture != end && capture->boundary == rows_.position[t] + 1; capture++) {
                float* kept = op_.segments + capture->segment * op_.segment_stride + at;
                for (long i = 0; i < op_.key_size; i++)
                    std::memcpy(kept + i * op_.value_size, state + i * op_.value_size, N * LANES * sizeof(float));
            }
        }
    }

    template <int N> void row(float* state, long t, long h, long column) const {
        const float* q = op_.q + t * op_.q_stride + h / group_ * op_.key_size;
        const float* k = op_.k + t * op_.k_stride + h / group_ * op_.key_size;
        const float* v = op_.v + t * op_.v_stride + h * op_.value_size + column;
        const V decay = splat(op_.decay[t * op_.heads + h]);
        V change[N], out[N];
        UNROLL for (int n = 0; n < N; n++) change[n] = load(v + n * LANES), out[n] = splat(0);
        if (op_.beta) {
            V known[N];
            UNROLL for (int n = 0; n < N; n++) known[n] = splat(0);
            for (long i = 0; i < op_.key_size; i++) {
                float* x = state + i * op_.value_size;
                UNROLL for (int n = 0; n < N; n++) {
                    const V decayed = load(x + n * LANES) * decay;
                    known[n] = fma(splat(k[i]), decayed, known[n]);
                    store(x + n * LANES, decayed);
                }
            }
            const V beta = splat(op_.beta[t * op_.heads + h]);
            UNROLL for (int n = 0; n < N; n++) change[n] = (change[n] - known[n]) * beta;
        }
        for (long i = 0; i < op_.key_size; i++) {
            float* x = state + i * op_.value_size;
            UNROLL for (int n = 0; n < N; n++) {
                const V before = load(x + n * LANES), kept = op_.beta ? before : before * decay;
                const V now = fma(splat(k[i]), change[n], kept);
                out[n] = fma(splat(q[i]), now, out[n]);
                store(x + n * LANES, now);
            }
        }
        float* y = op_.out + t * op_.out_stride + h * op_.value_size + column;
        UNROLL for (int n = 0; n < N; n++) store(y + n * LANES, out[n]);
    }

    const RecurrenceOp& op_;
    const Rows& rows_;
    const std::vector<Run> runs_;
    std::vector<std::vector<Piece>> captures_;
    const long group_, state_size_;
};

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;

SHOAL_EXPORT(shoal_recurrence)(const void* op, const Rows* rows, int threads) {
    const RecurrenceOp& of = *static_cast<const RecurrenceOp*>(op);
    if (!rows->fit_slots(of.num_slots)) return 1;
    SHOAL_ISA::Recurrence recurrence(of, *rows);
    if (!recurrence.take_captures()) return 1;
    parallel(threads, rows->sequences * of.heads * recurrence.blocks_per_head(), [&](long i) { recurrence.run(i); });
    return 0;
}
