// Attention over a paged key/value pool or a ring: one kernel for prefill and decode.
//
// What fixes the bits of one (row, head): keys are taken in tiles of 64 at absolute positions 64 i, tiles in segments
// of 256 at absolute positions 256 j.
//   score   = fma over d = 0..D-1 in order, from 0, of (q[d] * (scale * log2 e)) * k[d]: one chain a key
//   tile    : m' = max(m, scores); c = 2^(m - m'); w = 2^(score - m'); sums[key % 16] = sums[key % 16] * c + w;
//             acc[d] = acc[d] * c, then fma over the visible keys in order of w * v[d]
//   segment : its tiles in order from m = -inf, sums = acc = 0; l = the fixed tree over the 16 sums
//   row     : its segments in order: m' = max; l = fma(l_s, c_s, l * c); acc = fma(acc_s, c_s, acc * c);
//             out = acc * (1 / l)
//   sink    : a head's logit that has no value joins last: m' = max(m, sink * log2 e); c = 2^(m - m');
//             l = l * c + 2^(sink * log2 e - m'); out = acc * (c / l)
// A row at position p sees keys 0..p, or with a window of W the last W of them; of a ring that is not stored, none
// before valid_from. A tile or segment without a visible key is skipped, so that a window bounds the work and moves no
// tile. A key the row does not see never meets its arithmetic: its score is replaced by -inf and the value loop leaves
// it out. Everything else (query tiles, register blocks, threads, which tasks split by segment or by head) is only an
// order of evaluation.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "lanes.h"
#include "ops.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

using std::max, std::min;

constexpr int TILE = 64, SEGMENT = 256;
constexpr int MAX_GROUP = 512;  // most query heads to a key/value head
constexpr int UNIT = 192;       // query rows (times heads of a group) that share the packing of a tile
constexpr int FEW = 12;         // rows up to which keys and values are used where they lie: see attend_few

// A register block: rows by vectors.
constexpr int BLOCK_ROWS = REGISTERS == 32 ? 12 : REGISTERS == 8 ? 6 : 1;
constexpr int block_width(int rows) {
    if (REGISTERS == 32) return rows <= 4 ? 4 : 2;
    return REGISTERS == 1 ? 1 : rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

#define EACH_BLOCK_HEIGHT(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

// Calls f.operator()<R, N>(first vector) until all are done, in blocks of `rows` rows.
template <class F> void for_blocks(int rows, int vectors, const F& f) {
    switch (rows) {
#define CASE(R)                                                                     \
    case R:                                                                         \
        if constexpr (R <= BLOCK_ROWS) {                                            \
            constexpr int N = block_width(R);                                       \
            int j = 0;                                                              \
            for (; j + N <= vectors; j += N) f.template operator()<R, N>(j);        \
            for (; j < vectors; j++) f.template operator()<R, 1>(j);                \
        }                                                                           \
        return;
        EACH_BLOCK_HEIGHT(CASE)
#undef CASE
    }
}

// Matrices of a product. Vector j of row k of b is at b + j * b_vector + k * LANES.
struct Product {
    const float* a;
    long a_stride;
    const float* b;
    long b_vector;
    int depth;
    float* c;
    long c_stride;
    const float* factor;  // of each row of c before adding; null: c starts at 0
};

// c[r][j] = c[r][j] * factor[r], then += a[r][k] * b[k][j] for k = 0..depth-1 in order.
template <int R, int N> void multiply(const Product& m, int first) {
    const float* b = m.b + first * m.b_vector;
    float* c = m.c + first * LANES;
    V acc[R][N];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < N; j++)
            acc[r][j] = m.factor ? load(c + r * m.c_stride + j * LANES) * splat(m.factor[r]) : splat(0);
    const float* a = m.a;
    for (int k = 0; k < m.depth; k++, a++, b += LANES) {
        V row[N];
        UNROLL for (int j = 0; j < N; j++) row[j] = load(b + j * m.b_vector);
        UNROLL for (int r = 0; r < R; r++) {
            const V x = splat(a[r * m.a_stride]);
            UNROLL for (int j = 0; j < N; j++) fma_into(acc[r][j], x, row[j]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < N; j++) store(c + r * m.c_stride + j * LANES, acc[r][j]);
}

void product(int rows, int vectors, const Product& m) {
    for_blocks(rows, vectors, [&]<int R, int N>(int first) { multiply<R, N>(m, first); });
}

// Cache lines that will soon be wanted, in the order of memory: a slice of each of `left` rows that lie side by side,
// then of others. It is a guess: where rows do not lie so, nothing but time is lost.
struct Soon {
    const char *at, *then;
    int line, lines;  // of a slice
    long skip;        // bytes from the end of a slice to the next
    int left, more;   // slices before `then`, and from there on

    void fetch(int count) {
        UNROLL for (int i = 0; i < count; i++) {
            __builtin_prefetch(at, 0, 2);
            at += 64;
            if (++line < lines) continue;
            line = 0, at += skip;
            if (--left == 0) at = then, left = more;
        }
    }
};

// Scores of R rows and one vector of keys, which are turned round in registers. Fetches five lines for four it reads:
// values take less time than keys, and a core that asks for more lines than memory brings waits for those it has, too.
template <int R, class T>
[[gnu::noinline]] void scores_in_place(const float* q, int D, const T* const* keys, long at, Soon& soon, float* scores) {
    V acc[R];
    UNROLL for (int r = 0; r < R; r++) acc[r] = splat(0);
    Soon next = soon;
    for (int d = 0; d < D; d += PIECE<T>) {
        V piece[PIECE<T>];
        transpose(keys, at + d, piece);
        UNROLL for (int i = 0; i < PIECE<T>; i++) {
            if (i % (4 / sizeof(T)) == 0) next.fetch(1);
            if (i % (16 / sizeof(T)) == 1) next.fetch(1);
            UNROLL for (int r = 0; r < R; r++) fma_splat(acc[r], q + r * D + d + i, piece[i]);
        }
    }
    soon = next;
    UNROLL for (int r = 0; r < R; r++) store(scores + r * TILE, acc[r]);
}

// out = out * factor + weights * values for R rows and N vectors of D; without a factor, out + weights * values.
// Fetches three lines for four it reads.
template <int R, int N, class T>
[[gnu::noinline]] void values_in_place(const float* weights, const float* factor, int keys, const T* const* values,
                                       long at, Soon& soon, float* out, int D) {
    V acc[R][N];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < N; j++) {
            acc[r][j] = load(out + r * D + j * LANES);
            if (factor) acc[r][j] = acc[r][j] * splat(factor[r]);
        }
    Soon next = soon;
    for (int k = 0; k < keys; k++) {
        if (k % 4) next.fetch(max(1, N * LANES * int(sizeof(T)) / 64));
        const T* value = values[k] + at;
        V row[N];
        UNROLL for (int j = 0; j < N; j++) row[j] = load(value + j * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            const V weight = splat(weights[r * TILE + k]);
            UNROLL for (int j = 0; j < N; j++) fma_into(acc[r][j], weight, row[j]);
        }
    }
    soon = next;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < N; j++) store(out + r * D + j * LANES, acc[r][j]);
}

// Consecutive rows of one sequence, all of whose keys are at positions [oldest, last].
struct Unit {
    long first;
    int rows, oldest, last;

    int first_segment() const { return oldest / SEGMENT; }
    int end_segment() const { return last / SEGMENT + 1; }
    double keys() const { return last + 1.0 - oldest; }
    int keys_of(int segment) const {
        return std::min(last + 1, (segment + 1) * SEGMENT) - std::max(oldest, segment * SEGMENT);
    }
    int whole_segments() const { return (last + 1) / SEGMENT - (oldest + SEGMENT - 1) / SEGMENT; }
};

// The keys [begin, end) of a tile that a row sees.
struct Span {
    int begin, end;
    bool operator==(const Span&) const = default;
    bool empty() const { return begin == end; }
    int first_vector() const { return begin / LANES; }
    int end_vector() const { return (end + LANES - 1) / LANES; }
};

// Segments [segment, segment_end) of a unit's key/value heads [head, head_end). One that has all segments finishes its
// rows; else a segment leaves each head's part from `part` on, and a Join puts a head's parts together.
struct Task {
    int unit, segment, segment_end, head, head_end;
    long part;
};
struct Join {
    int unit, head, segments;
    long part;
};

// The softmax of some rows so far.
struct State {
    float *acc, *top, *sum;  // [rows, D]: unscaled output; [rows]: largest score; [rows]: sum of weights
    static long size(long rows, int D) { return rows * (D + 2); }
    static State at(float* p, long rows) { return {p + 2 * rows, p, p + rows}; }
};

struct Scratch {  // one a thread
    std::vector<float> memory;
    float *q, *k, *v, *weights, *factor, *sums;
    State segment, all;

    void reserve(long rows, int D) {
        const size_t size = rows * (3 * D + TILE + LANES + 5) + 2 * TILE * D + LANES;
        if (memory.size() < size) memory.resize(size);
        auto address = reinterpret_cast<uintptr_t>(memory.data());
        float* next = memory.data() + (-address & 63) / sizeof(float);
        auto take = [&](long n) { return std::exchange(next, next + n); };
        k = take(TILE * D), v = take(TILE * D);  // each a multiple of a cache line
        q = take(rows * D), segment.acc = take(rows * D), all.acc = take(rows * D);
        weights = take(rows * TILE), sums = take(rows * LANES), factor = take(rows);
        segment.top = take(rows), segment.sum = take(rows), all.top = take(rows), all.sum = take(rows);
    }
};

template <class T> class Attention {
public:
    Attention(const AttentionOp& op, const Rows& rows)
        : op_(op), pool_(*op.pool), rows_(rows), D_(pool_.head_size), heads_(pool_.heads),
          group_(op.q_heads / pool_.heads), unstored_(op.ring && !op.ring->segments.blocks) {}

    void run(int threads) {
        plan(threads);
        const auto parts = std::make_unique_for_overwrite<float[]>(parts_size_);
        parallel(threads, tasks_.size(), [&](long i) { task(tasks_[i], parts.get()); });
        parallel(threads, joins_.size(), [&](long i) { join(joins_[i], parts.get()); });
    }

private:
    // Where the keys and values of 64 positions lie. Those past the last that anyone sees repeat it: their scores are
    // masked.
    struct Tile {
        int keys;
        const T *k[TILE], *v[TILE];
    };

    // Where a position's key and value lie, and how many positions from it on lie behind one another.
    struct Place {
        const T *k, *v;
        long positions;
    };

    Place row(const void* k, const void* v, long k_at, long v_at, long row, long positions) const {
        const long offset = row * heads_ * D_;
        return {static_cast<const T*>(k) + k_at + offset, static_cast<const T*>(v) + v_at + offset, positions};
    }

    Place in_block(const Unit& u, long position) const {
        const long offset = position % pool_.block_rows;
        const long block = rows_.block(rows_.sequence[u.first], position / pool_.block_rows);
        return row(pool_.k, pool_.v, block * pool_.k_stride, block * pool_.v_stride, offset, pool_.block_rows - offset);
    }

    // What the step computes itself is not in the ring yet.
    Place in_ring(const Unit& u, long position) const {
        const Ring& ring = *op_.ring;
        const long sequence = rows_.sequence[u.first], before = rows_.start[sequence] - position;
        if (before <= 0)
            return row(ring.k, ring.v, 0, 0, u.first + position - rows_.position[u.first], u.last + 1 - position);
        const long slot = rows_.slot[sequence], offset = position % pool_.block_rows;
        return row(pool_.k, pool_.v, slot * pool_.k_stride, slot * pool_.v_stride, offset,
                   min(pool_.block_rows - offset, before));
    }

    void locate(const Unit& u, int begin, Tile& t) const {
        const long stride = long(heads_) * D_;
        t.keys = min(u.last + 1 - begin, TILE);
        for (int i = 0; i < t.keys;) {
            auto [k, v, positions] = op_.ring ? in_ring(u, begin + i) : in_block(u, begin + i);
            for (int end = min<long>(t.keys, i + positions); i < end; i++, k += stride, v += stride)
                t.k[i] = k, t.v[i] = v;
        }
        for (int i = t.keys; i < TILE; i++) t.k[i] = t.k[t.keys - 1], t.v[i] = t.v[t.keys - 1];
    }

    // The oldest position that a row sees.
    int oldest(long t) const {
        const int first = unstored_ ? rows_.valid_from[rows_.sequence[t]] : 0;
        return op_.window ? max(first, rows_.position[t] + 1 - op_.window) : first;
    }

    Span span(long t, int tile) const {
        return {std::clamp(oldest(t) - tile, 0, TILE), std::clamp(rows_.position[t] + 1 - tile, 0, TILE)};
    }

    // One row's scores of a tile become weights; updates its largest score and 16 sums. Returns the factor for acc.
    static float soften(float* scores, Span seen, float& top, float* sums) {
        const V hidden = splat(-INFINITY);
        V best = hidden;
        for (int i = seen.first_vector(); i < seen.end_vector(); i++) {
            V s = load(scores + i * LANES);
            if (seen.end < (i + 1) * LANES) s = if_less(lane_numbers(), splat(seen.end - i * LANES), s, hidden);
            if (seen.begin > i * LANES) s = if_less(lane_numbers(), splat(seen.begin - i * LANES), hidden, s);
            store(scores + i * LANES, s);
            best = max(best, s);
        }
        const float tile_top = largest(best), new_top = top > tile_top ? top : tile_top;
        const float factor = new_top == top ? 1.f : exp2(top - new_top);
        V sum = load(sums) * splat(factor);
        for (int i = seen.first_vector(); i < seen.end_vector(); i++) {
            const V weight = exp2(load(scores + i * LANES) - splat(new_top));
            store(scores + i * LANES, weight);
            sum = sum + weight;
        }
        store(sums, sum);
        top = new_top;
        return factor;
    }

    // The keys of one segment for a unit's rows and heads; leaves each row's top, sum and unscaled output in s.segment.
    void segment(const Unit& u, int index, int head, int head_end, Scratch& s) const {
        const int rows = u.rows * group_, all = rows * (head_end - head);
        const int begin = max(index * SEGMENT, u.oldest / TILE * TILE), last = min(u.last, (index + 1) * SEGMENT - 1);
        std::fill_n(s.segment.acc, long(all) * D_, 0.f);
        std::fill_n(s.segment.top, all, -INFINITY);
        std::fill_n(s.sums, all * LANES, 0.f);
        Tile tiles[2];
        locate(u, begin, tiles[0]);
        Span seen[MAX_GROUP];
        for (int at = begin, turn = 0; at <= last; at += TILE, turn ^= 1) {
            const Tile& tile = tiles[turn];
            const bool more = at + TILE <= u.last;  // of the next segment, maybe
            if (more) locate(u, at + TILE, tiles[turn ^ 1]);
            for (int r = 0; r < rows; r++) seen[r] = span(u.first + r / group_, at);
            if (rows <= FEW) {
                attend_few(tile, more ? tiles[turn ^ 1] : tile, head, head_end, rows, seen, s);
                continue;
            }
            for (int h = head; h < head_end; h++) attend_many(tile, h, (h - head) * rows, rows, seen, s);
        }
        for (int r = 0; r < all; r++) s.segment.sum[r] = sum(load(s.sums + r * LANES));
    }

    static void soften(int first_row, int rows, const Span* seen, Scratch& s, float* weights, float* factor) {
        for (int r = 0; r < rows; r++)
            if (!seen[r].empty())
                factor[r] = soften(weights + r * TILE, seen[r], s.segment.top[first_row + r],
                                   s.sums + (first_row + r) * LANES);
    }

    // Calls f(row, count) for runs of at most a block of rows that see the same keys, and any.
    template <class F> static void for_alike(int rows, const Span* seen, const F& f) {
        for (int r = 0, count; r < rows; r += count) {
            count = 1;
            while (count < BLOCK_ROWS && r + count < rows && seen[r + count] == seen[r]) count++;
            if (!seen[r].empty()) f(r, count);
        }
    }

    // What to fetch from a tile's second sixteen keys on, if there are as many: keys, then values.
    Soon after_sixteen(const Tile& tile, int head, int head_end) const {
        const int sixteen = min(LANES, tile.keys - 1);
        const long slice = (head_end - head) * D_ * sizeof(T), row = heads_ * D_ * sizeof(T);
        const int lines = int((slice + 63) / 64);
        return {start(tile.k[sixteen], head), start(tile.v[0], head), 0, lines, row - lines * 64, tile.keys - sixteen,
                tile.keys};
    }
    const char* start(const T* row, int head) const { return reinterpret_cast<const char*>(row + long(head) * D_); }

    // One tile for few rows: as fast as memory gives keys and values, which it does where they are asked for in the
    // order they lie in. So sixteen keys, then sixteen values, are taken for all heads, while others are fetched.
    void attend_few(const Tile& tile, const Tile& next, int head, int head_end, int rows, const Span* seen,
                    Scratch& s) const {
        const int all = rows * (head_end - head);
        Soon soon = after_sixteen(tile, head, head_end);
        for (int i = 0; i < tile.keys; i += LANES)
            for (int row = 0; row < all; row += rows)
                for (int r = row; r < row + rows; r += BLOCK_ROWS)
                    for_blocks(min(BLOCK_ROWS, row + rows - r), 1, [&]<int R, int N>(int) {
                        scores_in_place<R>(s.q + long(r) * D_, D_, tile.k + i, long(head + row / rows) * D_, soon,
                                           s.weights + r * TILE + i);
                    });
        for (int row = 0; row < all; row += rows)
            soften(row, rows, seen, s, s.weights + row * TILE, s.factor + row);
        soon.then = start(next.k[0], head), soon.more = next.keys;
        for (int i = 0; i < tile.keys; i += LANES)
            for (int row = 0; row < all; row += rows)
                for_alike(rows, seen, [&](int r, int count) {
                    const int begin = max(seen[r].begin, i), end = min(seen[r].end, i + LANES);
                    if (begin >= end) return;
                    const float* factor = begin == seen[r].begin ? s.factor + row + r : nullptr;
                    for_blocks(count, D_ / LANES, [&]<int R, int N>(int j) {
                        values_in_place<R, N>(s.weights + (row + r) * TILE + begin, factor, end - begin,
                                              tile.v + begin, long(head + row / rows) * D_ + j * LANES, soon,
                                              s.segment.acc + long(row + r) * D_ + j * LANES, D_);
                    });
                });
    }

    // One tile of one head for many rows: keys and values are packed, widened once, and then serve from L1.
    void attend_many(const Tile& tile, int head, int first_row, int rows, const Span* seen, Scratch& s) const {
        const long at = long(head) * D_;
        const float* q = s.q + long(first_row) * D_;
        float* acc = s.segment.acc + long(first_row) * D_;
        const int vectors = (tile.keys + LANES - 1) / LANES;
        for (int i = 0; i < vectors; i++)
            for (int d = 0; d < D_; d += PIECE<T>) {
                V piece[PIECE<T>];
                transpose(tile.k + i * LANES, at + d, piece);
                UNROLL for (int j = 0; j < PIECE<T>; j++) store(s.k + (i * D_ + d + j) * LANES, piece[j]);
            }
        for (int r = 0; r < rows; r += BLOCK_ROWS) {
            const int count = min(BLOCK_ROWS, rows - r);
            int first = TILE / LANES, end = 0;
            for (int i = r; i < r + count; i++)
                first = min(first, seen[i].first_vector()), end = max(end, seen[i].end_vector());
            product(count, end - first,
                    {q + long(r) * D_, D_, s.k + first * LANES * D_, long(LANES) * D_, D_,
                     s.weights + r * TILE + first * LANES, TILE, nullptr});
        }
        soften(first_row, rows, seen, s, s.weights, s.factor);
        for (int i = 0; i < tile.keys; i++)
            for (int d = 0; d < D_; d += LANES) store(s.v + d * TILE + i * LANES, load(tile.v[i] + at + d));
        for_alike(rows, seen, [&](int r, int count) {
            const auto [begin, end] = seen[r];
            product(count, D_ / LANES,
                    {s.weights + r * TILE + begin, TILE, s.v + begin * LANES, long(LANES) * TILE, end - begin,
                     acc + long(r) * D_, D_, s.factor + r});
        });
    }

    // Appends one segment.
    void merge(const State& to, const State& s, long rows) const {
        for (long r = 0; r < rows; r++) {
            if (s.top[r] == -INFINITY) continue;
            float* acc = to.acc + r * D_;
            const float* more = s.acc + r * D_;
            if (to.top[r] == -INFINITY) {
                std::memcpy(acc, more, D_ * sizeof(float));
                to.top[r] = s.top[r], to.sum[r] = s.sum[r];
                continue;
            }
            const float top = to.top[r] > s.top[r] ? to.top[r] : s.top[r];
            const float old = exp2(to.top[r] - top), fresh = exp2(s.top[r] - top);
            to.top[r] = top, to.sum[r] = std::fma(s.sum[r], fresh, to.sum[r] * old);
            for (int d = 0; d < D_; d += LANES)
                store(acc + d, fma(load(more + d), splat(fresh), load(acc + d) * splat(old)));
        }
    }

    void finish(const Unit& u, int head, int head_end, const State& s) const {
        const long rows = u.rows * group_;
        for (int h = head; h < head_end; h++)
            for (long r = 0; r < rows; r++) {
                const long i = (h - head) * rows + r;
                const int q_head = h * group_ + r % group_;
                float* out = op_.out + (u.first + r / group_) * op_.out_stride + q_head * D_;
                const V over = splat(op_.sinks ? over_sink(op_.sinks[q_head], s.top[i], s.sum[i]) : 1.f / s.sum[i]);
                for (int d = 0; d < D_; d += LANES) store(out + d, load(s.acc + i * D_ + d) * over);
            }
    }

    // What a row's output is multiplied with where a sink takes its share of the weights.
    static float over_sink(float sink, float top, float sum) {
        const float score = float(double(sink) * 1.4426950408889634), most = score > top ? score : top;
        const float factor = exp2(top - most);
        return factor / (sum * factor + exp2(score - most));
    }

    void load_q(const Unit& u, int head, int head_end, float* q) const {
        const V scale = splat(float(double(op_.scale) * 1.4426950408889634));
        for (int h = head; h < head_end; h++)
            for (long t = u.first; t < u.first + u.rows; t++) {
                const float* from = op_.q + t * op_.q_stride + h * group_ * D_;
                for (int d = 0; d < group_ * D_; d += LANES, q += LANES) store(q, load(from + d) * scale);
            }
    }

    void task(const Task& t, float* parts) const {
        static thread_local Scratch s;
        s.reserve(widest_, D_);
        const Unit& u = units_[t.unit];
        const long rows = long(u.rows) * group_ * (t.head_end - t.head);
        load_q(u, t.head, t.head_end, s.q);
        if (t.part >= 0) {
            segment(u, t.segment, t.head, t.head_end, s);
            const long one_head = long(u.rows) * group_;
            for (long row = 0; row < rows; row += one_head) {
                const State part = State::at(parts + t.part + row * (D_ + 2), one_head);
                std::copy_n(s.segment.top + row, one_head, part.top);
                std::copy_n(s.segment.sum + row, one_head, part.sum);
                std::copy_n(s.segment.acc + row * D_, one_head * D_, part.acc);
            }
            return;
        }
        std::fill_n(s.all.top, rows, -INFINITY);
        for (int i = t.segment; i < t.segment_end; i++) {
            segment(u, i, t.head, t.head_end, s);
            merge(s.all, s.segment, rows);
        }
        finish(u, t.head, t.head_end, s.all);
    }

    void join(const Join& j, float* parts) const {
        const Unit& u = units_[j.unit];
        const long rows = long(u.rows) * group_, segment = heads_ * State::size(rows, D_);
        const State whole = State::at(parts + j.part, rows);
        for (int i = 1; i < j.segments; i++) merge(whole, State::at(parts + j.part + i * segment, rows), rows);
        finish(u, j.head, j.head + 1, whole);
    }

    // Units of consecutive rows, and tasks small enough to keep all threads busy to the end. What is too long for one
    // task is split by segment, and by head: a unit of few rows had rather read its keys for all heads at once, and
    // leaves for single heads what would not go round.
    void plan(int threads) {
        const int most = max(1, UNIT / group_);
        double total = 0;
        for (long t = 0; t < rows_.count;) {
            Unit u{t, 0, rows_.position[t], -1};
            auto belongs = [&] { return rows_.sequence[t] == rows_.sequence[u.first]; };
            for (; t < rows_.count && u.rows < most && belongs(); t++, u.rows++)
                u.last = max(u.last, rows_.position[t]), u.oldest = min(u.oldest, oldest(t));
            units_.push_back(u);
            total += u.rows * u.keys() * heads_;
        }
        const double share = total / (4 * threads);
        for (int i = int(units_.size()) - 1; i >= 0; i--) {  // long units first
            const Unit& u = units_[i];
            const double one_head = u.rows * u.keys();
            const int first_segment = u.first_segment(), end_segment = u.end_segment();
            const bool few = u.rows * group_ <= FEW, whole = one_head * heads_ <= share;
            const bool by_segment = threads > 1 && end_segment - first_segment > 1 && (few ? !whole : one_head > share);
            widest_ = max(widest_, long(u.rows) * group_ * (few ? heads_ : 1));
            if (by_segment) {
                split(i, few ? u.whole_segments() / threads * threads : 0);
                continue;
            }
            const int step = few && (whole || threads == 1) ? heads_ : 1;
            for (int h = 0; h < heads_; h += step) tasks_.push_back({i, first_segment, end_segment, h, h + step, -1});
        }
    }

    // A task for each of the first `together` whole segments of a unit, and for each head of the others.
    void split(int unit, int together) {
        const Unit& u = units_[unit];
        const long part = State::size(long(u.rows) * group_, D_);
        for (int h = 0; h < heads_; h++)
            joins_.push_back({unit, h, u.end_segment() - u.first_segment(), parts_size_ + h * part});
        for (int s = u.first_segment(); s < u.end_segment(); s++, parts_size_ += heads_ * part) {
            const int step = u.keys_of(s) == SEGMENT && together-- > 0 ? heads_ : 1;
            for (int h = 0; h < heads_; h += step) tasks_.push_back({unit, s, s + 1, h, h + step, parts_size_ + h * part});
        }
    }

    const AttentionOp& op_;
    const Pool& pool_;
    const Rows& rows_;
    const int D_, heads_, group_;
    const bool unstored_;
    std::vector<Unit> units_;
    std::vector<Task> tasks_;
    std::vector<Join> joins_;
    long parts_size_ = 0, widest_ = 1;
};

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;

SHOAL_EXPORT(shoal_attention)(const void* op, const Rows* rows, int threads) {
    const auto& attention = *static_cast<const AttentionOp*>(op);
    if (attention.ring ? !rows->fit(*attention.ring) : !rows->fit(*attention.pool)) return 1;
    if (attention.pool->is_bf16)
        SHOAL_ISA::Attention<SHOAL_ISA::bf16>(attention, *rows).run(threads);
    else
        SHOAL_ISA::Attention<float>(attention, *rows).run(threads);
    return 0;
}
