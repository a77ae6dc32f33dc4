// Attention over a paged key/value pool: one kernel for prefill and decode.
//
// What fixes the bits of one (row, head): keys are taken in tiles of 64 at absolute positions 64 i, tiles in segments
// of 256 at absolute positions 256 j.
//   score   = fma over d = 0..D-1 in order, from 0, of (q[d] * (scale * log2 e)) * k[d]: one chain a key
//   tile    : m' = max(m, scores); c = 2^(m - m'); w = 2^(score - m'); sums[key % 16] = sums[key % 16] * c + w;
//             acc[d] = acc[d] * c, then fma over the visible keys in order of w * v[d]
//   segment : its tiles in order from m = -inf, sums = acc = 0; l = the fixed tree over the 16 sums
//   row     : its segments in order: m' = max; l = fma(l_s, c_s, l * c); acc = fma(acc_s, c_s, acc * c);
//             out = acc * (1 / l)
// A tile or segment without a visible key is skipped. A key the row does not see never meets its arithmetic: its score
// is replaced by -inf and the value loop ends before it. Everything else (query tiles, register blocks, threads, which
// tasks split by segment) is only an order of evaluation.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "lanes.h"
#include "paged.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

using std::max, std::min;

constexpr int TILE = 64, SEGMENT = 256;
constexpr int MAX_GROUP = 512;       // most query heads to a key/value head
constexpr int UNIT = 192;            // query rows (times heads of a group) that share the packing of a tile
constexpr int BLOCK_ROWS = REGISTERS == 1 ? 1 : 6, WIDTH = REGISTERS == 32 ? 2 : 1;  // a register block
constexpr int block_width(int rows) { return REGISTERS == 1 ? 1 : (rows == 1 ? 4 : rows <= 3 ? 2 : 1) * WIDTH; }

// What to fetch while multiplying: step k touches `bytes` bytes of rows[k % 64], every 64 steps the next `bytes`.
struct Ahead {
    const char* const* rows;
    long offset;
    int bytes;
};

// Matrices of a product. Vector j of row k of b is at b + j * b_vector + k * b_stride.
template <class T> struct Product {
    const float* a;
    long a_stride;
    const T* b;
    long b_stride, b_vector;
    int depth;
    float* c;
    long c_stride;
    const float* factor;  // of each row of c before adding; null: c starts at 0
    Ahead ahead;
};

// c[r][j] = c[r][j] * factor[r], then += a[r][k] * b[k][j] for k = 0..depth-1 in order.
template <int R, int N, bool PREFETCH, class T> void block(const Product<T>& m, int first) {
    const T* b0 = m.b + first * m.b_vector;
    float* c0 = m.c + first * LANES;
    V acc[R][N];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < N; j++)
            acc[r][j] = m.factor ? load(c0 + r * m.c_stride + j * LANES) * splat(m.factor[r]) : splat(0);
    for (int k = 0; k < m.depth; k++) {
        if constexpr (PREFETCH) {
            const char* p = m.ahead.rows[k % TILE] + m.ahead.offset + k / TILE * m.ahead.bytes;
            for (int i = 0; i < m.ahead.bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
        }
        UNROLL for (int j = 0; j < N; j++) {
            V b = load(b0 + k * m.b_stride + j * m.b_vector);
            const float* a = m.a + k;
            hold(b);
            if (R * N > 5 && N > 1) hold(a);
            UNROLL for (int r = 0; r < R; r++) acc[r][j] = fma(splat(a[r * m.a_stride]), b, acc[r][j]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < N; j++) store(c0 + r * m.c_stride + j * LANES, acc[r][j]);
}

template <int R, bool PREFETCH, class T> void columns(const Product<T>& m, int vectors) {
    constexpr int N = block_width(R);
    int j = 0;
    for (; j + N <= vectors; j += N) block<R, N, PREFETCH>(m, j);
    for (; j < vectors; j++) block<R, 1, false>(m, j);
}

template <bool PREFETCH, class T> void product(int rows, int vectors, const Product<T>& m) {
    switch (rows) {
#define CASE(R)                                                               \
    case R:                                                                   \
        if constexpr (R <= BLOCK_ROWS) columns<R, PREFETCH>(m, vectors);      \
        return;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
}

// Sixteen keys transposed to [D][16]: out[d][i] = rows[i][d].
#if defined(__AVX2__)
inline void transpose4(const __m256 (&row)[4], __m256 (&out)[4]) {
    const __m256 a = _mm256_unpacklo_ps(row[0], row[1]), b = _mm256_unpackhi_ps(row[0], row[1]);
    const __m256 c = _mm256_unpacklo_ps(row[2], row[3]), d = _mm256_unpackhi_ps(row[2], row[3]);
    out[0] = _mm256_shuffle_ps(a, c, 0x44), out[1] = _mm256_shuffle_ps(a, c, 0xEE);
    out[2] = _mm256_shuffle_ps(b, d, 0x44), out[3] = _mm256_shuffle_ps(b, d, 0xEE);
}
// Four 32-bit words at offset d of eight rows: out[i] holds word i of rows 0..7.
template <class T> void transpose8(const T* const* rows, long d, __m256 (&out)[4]) {
    __m256 pairs[4];
    UNROLL for (int i = 0; i < 4; i++)
        pairs[i] = _mm256_set_m128(_mm_loadu_ps(reinterpret_cast<const float*>(rows[i + 4] + d)),
                                   _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + d)));
    transpose4(pairs, out);
}
void transpose(const float* const* rows, long offset, int D, float* out) {
    for (int half = 0; half < 16; half += 8)
        for (int d = 0; d < D; d += 4) {
            __m256 words[4];
            transpose8(rows + half, offset + d, words);
            UNROLL for (int i = 0; i < 4; i++) _mm256_store_ps(out + (d + i) * LANES + half, words[i]);
        }
}
void transpose(const bf16* const* rows, long offset, int D, float* out) {  // two bf16 move as one word
    const __m256i high = _mm256_set1_epi32(int(0xffff0000));
    for (int half = 0; half < 16; half += 8)
        for (int d = 0; d < D; d += 8) {
            __m256 words[4];
            transpose8(rows + half, offset + d, words);
            UNROLL for (int i = 0; i < 4; i++) {
                const __m256i word = _mm256_castps_si256(words[i]);
                float* even = out + (d + 2 * i) * LANES + half;
                _mm256_store_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(word, 16)));
                _mm256_store_ps(even + LANES, _mm256_castsi256_ps(_mm256_and_si256(word, high)));
            }
        }
}
#else
template <class T> void transpose(const T* const* rows, long offset, int D, float* out) {
    for (int d = 0; d < D; d++)
        for (int i = 0; i < LANES; i++) out[d * LANES + i] = widen(rows[i][offset + d]);
}
#endif

// Consecutive rows of one sequence, seeing positions 0..last at most.
struct Unit {
    long first;
    int rows, last;
};

// Segments [segment, segment_end) of a unit's key/value heads [head, head_end). One that has all segments finishes its
// rows; else each segment leaves its part at `part`, and a Join puts them together.
struct Task {
    int unit, segment, segment_end, head, head_end;
    long part;
};
struct Join {
    int unit, head, head_end, segments;
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

struct Arguments {
    const float* q;
    long q_stride;
    const Pool& pool;
    const Rows& rows;
    float scale;
    float* out;
    long out_stride;
    int q_heads;
};

template <class T> class Kernel {
public:
    explicit Kernel(const Arguments& a)
        : a_(a), D_(a.pool.head_size), heads_(a.pool.heads), group_(a.q_heads / a.pool.heads) {}

    void run(int threads) {
        plan(threads);
        std::vector<float> parts(parts_size_);
        parallel(threads, tasks_.size(), [&](long i) { task(tasks_[i], parts.data()); });
        parallel(threads, joins_.size(), [&](long i) { join(joins_[i], parts.data()); });
    }

private:
    // Where the keys and values of 64 positions lie. Those past the last that anyone sees repeat it: their scores are
    // masked.
    struct Tile {
        int keys;
        int runs, run[TILE + 1];  // starts of the pieces that are contiguous in the pool, closed by `keys`
        const T *k[TILE], *v[TILE];
    };

    void locate(const Unit& u, int begin, Tile& t) const {
        const Pool& pool = a_.pool;
        const long stride = long(heads_) * D_, sequence = a_.rows.sequence[u.first];
        t.keys = min(u.last + 1 - begin, TILE), t.runs = 0;
        for (int i = 0; i < t.keys;) {
            const long position = begin + i, offset = position % pool.block_rows;
            const long block = a_.rows.block(sequence, position / pool.block_rows);
            const T* k = static_cast<const T*>(pool.k) + block * pool.k_stride + offset * stride;
            const T* v = static_cast<const T*>(pool.v) + block * pool.v_stride + offset * stride;
            t.run[t.runs++] = i;
            for (int end = min<long>(t.keys, i + pool.block_rows - offset); i < end; i++, k += stride, v += stride)
                t.k[i] = k, t.v[i] = v;
        }
        t.run[t.runs] = t.keys;
        for (int i = t.keys; i < TILE; i++) t.k[i] = t.k[t.keys - 1], t.v[i] = t.v[t.keys - 1];
    }

    // One row's scores of a tile become weights; updates its largest score and 16 sums. Returns the factor for acc.
    static float soften(float* scores, int visible, float& top, float* sums) {
        const int vectors = (visible + LANES - 1) / LANES;
        const V hidden = splat(-INFINITY);
        V best = hidden;
        for (int i = 0; i < vectors; i++) {
            V s = load(scores + i * LANES);
            if (visible < (i + 1) * LANES) s = if_less(lane_numbers(), splat(visible - i * LANES), s, hidden);
            store(scores + i * LANES, s);
            best = max(best, s);
        }
        const float tile_top = largest(best), new_top = top > tile_top ? top : tile_top;
        const float factor = new_top == top ? 1.f : exp2(top - new_top);
        V sum = load(sums) * splat(factor);
        for (int i = 0; i < vectors; i++) {
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
        const int begin = index * SEGMENT, last = min(u.last, begin + SEGMENT - 1);
        std::fill_n(s.segment.acc, long(all) * D_, 0.f);
        std::fill_n(s.segment.top, all, -INFINITY);
        std::fill_n(s.sums, all * LANES, 0.f);
        Tile tiles[2];
        locate(u, begin, tiles[0]);
        int visible[MAX_GROUP];
        for (int at = begin, turn = 0; at <= last; at += TILE, turn ^= 1) {
            const Tile& tile = tiles[turn];
            const bool more = at + TILE <= last;
            if (more) locate(u, at + TILE, tiles[turn ^ 1]);
            for (int r = 0; r < rows; r++)
                visible[r] = std::clamp(a_.rows.position[u.first + r / group_] + 1 - at, 0, TILE);
            for (int h = head; h < head_end; h++) {
                const bool last_head = h + 1 == head_end;
                const Tile& next = last_head && more ? tiles[turn ^ 1] : tile;
                attend(tile, next, (last_head ? head : h + 1), h, (h - head) * rows, rows, visible, s);
            }
        }
        for (int r = 0; r < all; r++) s.segment.sum[r] = sum(load(s.sums + r * LANES));
    }

    // One tile of one head. Meanwhile fetches `next_head` of the tile `next`.
    void attend(const Tile& tile, const Tile& next, int next_head, int head, int first_row, int rows,
                const int* visible, Scratch& s) const {
        const long at = long(head) * D_;
        const float* q = s.q + long(first_row) * D_;
        float* acc = s.segment.acc + long(first_row) * D_;
        const bool many = rows > 2 * BLOCK_ROWS;  // then the tile serves from L1, widened once, and nothing is fetched
        const int width = block_width(min(rows, BLOCK_ROWS));
        const long next_at = long(next_head) * D_ * sizeof(T);
        const int bytes = width * LANES * int(sizeof(T)), vectors = (tile.keys + LANES - 1) / LANES;

        for (int i = 0; i < vectors; i++) transpose(tile.k + i * LANES, at, D_, s.k + i * LANES * D_);
        const int key_step = many ? WIDTH : width;
        for (int i = 0; i < vectors; i += key_step)
            for (int r = 0; r < rows; r += BLOCK_ROWS) {
                const int together = min(BLOCK_ROWS, rows - r);
                const int seen = *std::max_element(visible + r, visible + r + together);
                const int end = min({i + key_step, vectors, (seen + LANES - 1) / LANES});
                if (i >= end) continue;
                Product<float> scores{q + long(r) * D_, D_, s.k + i * LANES * D_, LANES, long(LANES) * D_, D_,
                                      s.weights + r * TILE + i * LANES, TILE, nullptr, {}};
                if (many) {
                    product<false>(together, end - i, scores);
                } else {
                    scores.ahead = {reinterpret_cast<const char* const*>(next.k),
                                    next_at + long(i) * LANES * D_ / TILE * long(sizeof(T)), bytes};
                    product<true>(together, end - i, scores);
                }
            }

        for (int r = 0; r < rows; r++)
            if (visible[r])
                s.factor[r] = soften(s.weights + r * TILE, visible[r], s.segment.top[first_row + r],
                                     s.sums + (first_row + r) * LANES);

        if (many)
            for (int i = 0; i < tile.keys; i++)
                for (int d = 0; d < D_; d += LANES) store(s.v + d * TILE + i * LANES, load(tile.v[i] + at + d));
        static constexpr float ones[] = {1, 1, 1, 1, 1, 1};
        static_assert(BLOCK_ROWS <= std::size(ones));
        const int value_step = many ? LANES * WIDTH : LANES * width;
        for (int d = 0; d < D_; d += value_step) {
            const int step = min(value_step, D_ - d);
            for (int r = 0, together; r < rows; r += together) {  // rows that see the same keys
                together = 1;
                while (together < BLOCK_ROWS && r + together < rows && visible[r + together] == visible[r]) together++;
                if (!visible[r]) continue;
                const float* weights = s.weights + r * TILE;
                float* out = acc + long(r) * D_ + d;
                if (many) {
                    product<false>(together, step / LANES,
                                   Product<float>{weights, TILE, s.v + d * TILE, LANES, long(LANES) * TILE, visible[r],
                                                  out, D_, s.factor + r, {}});
                    continue;
                }
                for (int i = 0; i < tile.runs; i++) {
                    const int begin = tile.run[i], end = min(visible[r], tile.run[i + 1]);
                    if (begin >= end) break;
                    const Ahead ahead{reinterpret_cast<const char* const*>(next.v) + begin,
                                      next_at + d * long(sizeof(T)), bytes};
                    product<true>(together, step / LANES,
                                  Product<T>{weights + begin, TILE, tile.v[begin] + at + d, long(heads_) * D_, LANES,
                                             end - begin, out, D_, begin == 0 ? s.factor + r : ones, ahead});
                }
            }
        }
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
                float* out = a_.out + (u.first + r / group_) * a_.out_stride + (h * group_ + r % group_) * D_;
                const V over = splat(1.f / s.sum[i]);
                for (int d = 0; d < D_; d += LANES) store(out + d, load(s.acc + i * D_ + d) * over);
            }
    }

    void load_q(const Unit& u, int head, int head_end, float* q) const {
        const V scale = splat(float(double(a_.scale) * 1.4426950408889634));
        for (int h = head; h < head_end; h++)
            for (long t = u.first; t < u.first + u.rows; t++) {
                const float* from = a_.q + t * a_.q_stride + h * group_ * D_;
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
            const State part = State::at(parts + t.part, rows);
            std::copy_n(s.segment.top, rows, part.top);
            std::copy_n(s.segment.sum, rows, part.sum);
            std::copy_n(s.segment.acc, rows * D_, part.acc);
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
        const long rows = long(u.rows) * group_ * (j.head_end - j.head);
        const State whole = State::at(parts + j.part, rows);
        for (int i = 1; i < j.segments; i++)
            merge(whole, State::at(parts + j.part + i * State::size(rows, D_), rows), rows);
        finish(u, j.head, j.head_end, whole);
    }

    // Units of consecutive rows, and tasks small enough to keep all threads busy to the end. A unit of few rows reads
    // its keys once for all heads; what is too long for one task is split by head, then by segment.
    void plan(int threads) {
        const int most = max(1, UNIT / group_);
        double total = 0;
        for (long t = 0; t < a_.rows.count;) {
            Unit u{t, 0, -1};
            auto belongs = [&] { return a_.rows.sequence[t] == a_.rows.sequence[u.first]; };
            for (; t < a_.rows.count && u.rows < most && belongs(); t++, u.rows++)
                u.last = max(u.last, a_.rows.position[t]);
            units_.push_back(u);
            total += double(u.rows) * (u.last + 1) * heads_;
        }
        const double share = total / (4 * threads);
        for (int i = int(units_.size()) - 1; i >= 0; i--) {  // long units first
            const Unit& u = units_[i];
            const double one_head = double(u.rows) * (u.last + 1);
            const int segments = u.last / SEGMENT + 1;
            const bool few = u.rows * group_ <= 2 * BLOCK_ROWS, whole = one_head * heads_ <= share;
            const bool by_segment = threads > 1 && segments > 1 && (few ? !whole : one_head > share);
            const bool all_heads = few && (whole || threads == 1 || (by_segment && segments >= 4 * threads));
            const int step = all_heads ? heads_ : 1;
            widest_ = max(widest_, long(u.rows) * group_ * step);
            for (int h = 0; h < heads_; h += step) {
                if (!by_segment) {
                    tasks_.push_back({i, 0, segments, h, h + step, -1});
                    continue;
                }
                joins_.push_back({i, h, h + step, segments, parts_size_});
                for (int s = 0; s < segments; s++) {
                    tasks_.push_back({i, s, s + 1, h, h + step, parts_size_});
                    parts_size_ += State::size(long(u.rows) * group_ * step, D_);
                }
            }
        }
    }

    const Arguments& a_;
    const int D_, heads_, group_;
    std::vector<Unit> units_;
    std::vector<Task> tasks_;
    std::vector<Join> joins_;
    long parts_size_ = 0, widest_ = 1;
};

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;

SHOAL_EXPORT(shoal_attention)(const float* q, long q_stride, int q_heads, const Pool* pool, const Rows* rows,
                              float scale, float* out, long out_stride, int threads) {
    if (!rows->fit(*pool)) return 1;
    const SHOAL_ISA::Arguments arguments{q, q_stride, *pool, *rows, scale, out, out_stride, q_heads};
    if (pool->is_bf16)
        SHOAL_ISA::Kernel<SHOAL_ISA::bf16>(arguments).run(threads);
    else
        SHOAL_ISA::Kernel<float>(arguments).run(threads);
    return 0;
}
