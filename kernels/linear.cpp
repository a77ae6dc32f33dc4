// y[T, N] = x[T, K] w[N, K]^T for float32 activations and float32, bfloat16 or float16 weights.
//
// Every y[t][n] is the float32 chain
//     acc = 0; for k in 0..K-1: acc = fma(x[t][k], w[n][k], acc)
// plus a bias if the matrix has one, and nothing else: no tile, thread count, row count or instruction set shows in the
// bits. This works because vector lanes run over n (outputs), never over k: each step broadcasts one x and does one fma
// a lane. What a caller asks for beside (a gate, a residual) takes the finished sum.
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "lanes.h"
#include "linear.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

template <class T> constexpr long FOUR_BYTES = std::is_same_v<T, float> ? 512 : std::is_same_v<T, bf12> ? 192 : 256;

// Four k of one panel: half `half` of the pair's at `pair`.
template <class T> struct Four {
    const T* at;
    Four() = default;
    Four(const char* pair, int half, Table) : at(reinterpret_cast<const T*>(pair) + half * 64) {}
    template <int k> V get() const { return load(at + k * LANES); }
};
template <int k> V half_words(V words) { return k % 2 ? odd(words) : even(words); }
template <> struct Four<bf16> {
    const bf16* at;
    Four() = default;
    Four(const char* pair, int half, Table) : at(reinterpret_cast<const bf16*>(pair) + half * 64) {}
    template <int k> V get() const { return half_words<k>(load_words(at + k / 2 * 2 * LANES)); }
};
template <> struct Four<bf12> {
    V words[2];
    Four() = default;
    Four(const char* pair, int half, Table table) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(pair);
        decode(bytes + half * 64, bytes + 128, half, table, words);
    }
    template <int k> V get() const { return half_words<k>(words[k / 2]); }
};

constexpr int ACCUMULATORS = REGISTERS == 32 ? 24 : REGISTERS == 8 ? 6 : 1;
template <class T> constexpr long panels_per_tile(long rows) {
    const bool one_pair = std::is_same_v<T, bf12>;  // each pair has its own table
    return REGISTERS == 32 ? (rows <= 6 && !one_pair ? 4 : 2) : REGISTERS == 8 ? (rows <= 3 ? 2 : 1) : 1;
}
constexpr long MAX_ROWS = 144;  // rows of a work item: the more of them, the less unpacking; their x should stay in L2
constexpr long DEPTH = 768;    // k of one pass: a panel's weights stay in L1
constexpr long GROUP = 4;      // panels between two epilogues
template <class T> constexpr long expanded_size = std::is_same_v<T, bf12> ? DEPTH / 4 * 256 : 1;

// Where a tile's weights are; `at` is where k 0 of its first pair would be.
struct Panels {
    const char* at;
    long pair_bytes;
    int half;     // the one panel of its pair, where the tile has one
    Table table;  // of bf12
};

// A tile's rows of x, and their sums [panel][row][16].
struct Block {
    const float* x;
    long x_stride, rows;
    float* sums;
    long panel_stride;
};

// Weights that later tiles will want, and how often (once in `every` fours) to ask for four k of them.
struct Ahead {
    const char* at;
    long four_bytes;
    int half, every, wait;  // half: the panel of their pair; -1: both
};

// sums[p][r] += x[r][k] * w[p][k] for k = begin..end-1 in order: R rows by P panels held in registers. Sums are exact
// float32, so taking k in several passes changes no bit.
template <class T, int R, int P>
[[gnu::noinline]] void tile(Panels w, const Block& b, long begin, long end, Ahead& ahead) {
    V acc[R][P];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++)
            acc[r][p] = begin == 0 ? splat(0) : load(b.sums + p * b.panel_stride + r * LANES);

    // A register that all panels of a step multiply with one x is free again for the next x: 24 sums, the weights and
    // one x fit. Three rows to a pointer are what an address can reach without arithmetic.
    const long x_stride = b.x_stride;
    const float* rows[(R + 2) / 3];
    UNROLL for (int i = 0; i < (R + 2) / 3; i++) rows[i] = b.x + begin + 3 * i * x_stride;
    w.at += begin / 4 * FOUR_BYTES<T>;
    Four<T> four[P];
    auto find = [&]() __attribute__((always_inline)) {
        UNROLL for (int p = 0; p < P; p++)
            four[p] = Four<T>(w.at + p / 2 * w.pair_bytes, P > 1 ? p % 2 : w.half, w.table);
    };
    auto step = [&]<int k>(std::integral_constant<int, k>) __attribute__((always_inline)) {
        V weights[P];
        UNROLL for (int p = 0; p < P; p++) weights[p] = four[p].template get<k>();
        UNROLL for (int r = 0; r < R; r++) {
            const V xs = splat(rows[r / 3][r % 3 * x_stride + k]);
            UNROLL for (int p = 0; p < P; p++) fma_into(acc[r][p], xs, weights[p]);
        }
    };
    constexpr std::integral_constant<int, 0> k0;
    constexpr std::integral_constant<int, 1> k1;
    constexpr std::integral_constant<int, 2> k2;
    constexpr std::integral_constant<int, 3> k3;
    Ahead next = ahead;
    long left = end - begin;
    for (; left >= 4; left -= 4, w.at += FOUR_BYTES<T>) {
        if (--next.wait == 0) {
            UNROLL for (int p = 0; p < P; p += 2)
                UNROLL for (int i = 0; i < FOUR_BYTES<T>; i += 64)
                    if (P > 1 || next.half < 0 || i / 64 % 2 == next.half)
                        __builtin_prefetch(next.at + p / 2 * w.pair_bytes + i, 0, 2);
            next.at += next.four_bytes, next.wait = next.every;
        }
        find(), step(k0), step(k1), step(k2), step(k3);
        UNROLL for (auto& row : rows) row += 4, hold(row);
    }
    ahead = next;
    if (left > 0) find(), step(k0);
    if (left > 1) step(k1);
    if (left > 2) step(k2);

    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++) store(b.sums + p * b.panel_stride + r * LANES, acc[r][p]);
}

template <class T> using Tile = decltype(&tile<T, 1, 1>);

template <class T, int P> Tile<T> tile_of(long rows) {
    switch (rows) {
#define CASE(R)                                                     \
    case R:                                                         \
        if constexpr (R * P <= ACCUMULATORS) return tile<T, R, P>;  \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
    __builtin_unreachable();  // multiply() makes no higher tiles
}
template <class T> Tile<T> tile_of(long rows, long panels) {
    if constexpr (!std::is_same_v<T, bf12>)
        if (panels == 4) return tile_of<T, 4>(rows);
    return panels == 2 ? tile_of<T, 2>(rows) : tile_of<T, 1>(rows);
}

template <class T> void multiply(Panels w, long panels, const Block& b, long begin, long end, Ahead& ahead) {
    tile_of<T>(b.rows, panels)(w, b, begin, end, ahead);
}

// The same where some fours lie apart.
void multiply_around(const Linear::Pair& pair, Panels w, long panels, const Block& b, long begin, long end,
                     Ahead& ahead) {
    for (const auto& rare : pair.rare_within(begin / 4, (end + 3) / 4)) {
        const long at = rare.four * 4, after = std::min(at + 4, end);
        const char* values = reinterpret_cast<const char*>(rare.values);
        const Panels apart{values - rare.four * FOUR_BYTES<bf16>, 0, w.half, w.table};
        if (begin < at) multiply<bf12>(w, panels, b, begin, at, ahead);
        multiply<bf16>(apart, panels, b, at, after, ahead);
        begin = after;
    }
    if (begin < end) multiply<bf12>(w, panels, b, begin, end, ahead);
}

// Writes k from `begin` to `end` of a pair as bf16.
void decode(const Linear::Pair& pair, const Panels& w, long begin, long end, char* out) {
    const long first = begin / 4, fours = (end - begin + 3) / 4;
    for (long i = 0; i < fours; i++)
        UNROLL for (int half = 0; half < 2; half++) {
            const Four<bf12> four(w.at + (first + i) * FOUR_BYTES<bf12>, half, w.table);
            float* words = reinterpret_cast<float*>(out + i * FOUR_BYTES<bf16> + half * 128);
            store(words, four.words[0]), store(words + LANES, four.words[1]);
        }
    for (const auto& rare : pair.rare_within(first, first + fours))
        std::memcpy(out + (rare.four - first) * FOUR_BYTES<bf16>, rare.values, FOUR_BYTES<bf16>);
}

template <class T> constexpr long tiles_of(long rows) {
    return (rows * panels_per_tile<T>(rows) + ACCUMULATORS - 1) / ACCUMULATORS;
}
// How many panels share what is done to get at their weights: unpacking, if they serve several tiles of rows.
template <class T> constexpr long panels_together(long rows) {
    return std::is_same_v<T, bf12> && tiles_of<T>(rows) > 1 ? 2 : panels_per_tile<T>(rows);
}

// All k of `panels` panels from `panel` on, for x's rows.
template <class T>
void multiply(const Linear& w, long panel, long panels, const float* x, long x_stride, long rows, float* sums) {
    const long tiles = tiles_of<T>(rows), wide = std::min(panels_per_tile<T>(rows), panels);
    const long next = panel + panels, pair = panel / 2;
    const char* data = w.data.get();
    // Several tiles take turns to fetch the next panels. A single tile of whole pairs is one sequential stream: cores
    // with AVX-512 gain 10 to 30% when asked 8 KB ahead, the hardware prefetcher of AVX2 ones does better unasked.
    const bool stream = panels > 1 && tiles == 1;
    const long turns = tiles * (panels / wide);
    const int every = stream ? REGISTERS == 32 : int(turns);
    Panels from{data + pair * w.pair_bytes(), w.pair_bytes(), int(panel % 2), Table{}};
    alignas(64) char decoded[std::is_same_v<T, bf12> ? DEPTH / 4 * FOUR_BYTES<bf16> : 1];
    if constexpr (std::is_same_v<T, bf12>) from.table = load_table(w.pairs[pair].table);
    for (long k = 0; k < w.num_inputs; k += DEPTH) {
        const long end = std::min(k + DEPTH, w.num_inputs);
        if constexpr (std::is_same_v<T, bf12>)
            if (tiles > 1) decode(w.pairs[pair], from, k, end, decoded);
        for (long turn = 0, row = 0; turn < turns;) {  // near-equal tiles
            const long i = turn * tiles / turns, height = rows / tiles + (i < rows % tiles);
            for (long p = 0; p < panels; p += wide, turn++) {
                const long four = stream ? k / 4 + 32 : k / 4 + (end - k) * turn / turns / 4;
                Ahead ahead{data + (stream ? pair : next / 2) * w.pair_bytes() + four * FOUR_BYTES<T>, FOUR_BYTES<T>,
                            panels > wide ? -1 : int(next % 2), every, every};
                const Block b{x + row * x_stride, x_stride, height, sums + (p * rows + row) * LANES, rows * LANES};
                from.half = int((panel + p) % 2);
                if constexpr (!std::is_same_v<T, bf12>)
                    multiply<T>(from, wide, b, k, end, ahead);
                else if (tiles == 1)
                    multiply_around(w.pairs[pair], from, wide, b, k, end, ahead);
                else
                    multiply<bf16>(Panels{decoded - k / 4 * FOUR_BYTES<bf16>, 0, from.half, from.table}, wide, b, k,
                                   end, ahead);
            }
            row += height;
        }
    }
}

// silu: Hendrycks & Gimpel 2016, x sigmoid(x), as gate of GLU (Shazeer 2020). gelu_tanh: the same paper's
// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is x sigmoid of twice what tanh has there. clamped_swiglu:
// gpt-oss, gate sigmoid(1.702 gate) (up + 1), both clamped at 7, gate only above.
V gated(Gate how, V gate, V up) {
    constexpr double log2_e = 1.4426950408889634, gelu = -2 * 0.7978845608028654 * log2_e;
    switch (how) {
        case Gate::silu: return times_sigmoid(gate, gate * splat(float(-log2_e))) * up;
        case Gate::gelu_tanh: {
            const V e = gate * fma(gate * gate, splat(float(gelu * 0.044715)), splat(float(gelu)));
            return times_sigmoid(gate, e) * up;
        }
        case Gate::clamped_swiglu: {
            const V most = splat(7), least = splat(-7);
            gate = if_less(most, gate, most, gate);
            up = if_less(most, up, most, if_less(up, least, least, up));
            return times_sigmoid(gate, gate * splat(float(-1.702 * log2_e))) * (up + splat(1));
        }
    }
    __builtin_unreachable();  // cpu.py names no other
}

void finish(const LinearOp& c, long panel, long panels, long row, long rows, const float* sums) {
    const long panel_stride = rows * LANES, step = c.w->gate_up ? 2 : 1;
    for (long r = 0; r < rows; r++) {
        float* y = c.y + (row + r) * c.y_stride;
        for (long p = 0; p < panels; p += step) {
            const float* s = sums + p * panel_stride + r * LANES;
            const long n = (panel + p) / step * LANES, left = c.w->num_outputs - n;
            const float* bias = c.w->bias.empty() ? nullptr : c.w->bias.data() + (panel + p) * LANES;
            V v = load(s), up = load(s + (step - 1) * panel_stride);
            if (bias) v = v + load(bias), up = up + load(bias + (step - 1) * LANES);
            if (c.w->gate_up) v = gated(c.gate, v, up);
            if (c.add) v = load_part(y + n, left) + v;
            store_part(y + n, v, left);
        }
    }
}

template <class T> void block(const LinearOp& c, long row, long rows, long panel, long end) {
    alignas(64) float sums[GROUP * MAX_ROWS * LANES];
    for (long group = panel; group < end; group += GROUP) {
        const long panels = std::min(GROUP, end - group);
        for (long p = 0; p < panels;) {
            long together = std::min(panels_together<T>(rows), panels - p);
            if (together == 3) together = 2;
            multiply<T>(*c.w, group + p, together, c.x + row * c.x_stride, c.x_stride, rows,
                        sums + p * rows * LANES);
            p += together;
        }
        finish(c, group, panels, row, rows, sums);
    }
}

// A linear's work items: blocks of rows by runs of panels, an even number each.
class Items {
public:
    Items(const LinearOp& op, long rows, int threads) : op_(op), rows_(rows) {
        const long panels = op.w->panels();
        blocks_ = (rows + MAX_ROWS - 1) / MAX_ROWS;
        // Items that take long are cut smaller, so that a thread that is held up holds nobody else up, but no further:
        // an item's first weights come unasked.
        const long per_block = threads * (rows > 48 ? std::max(1L, panels / threads / 16) : 1);
        run_ = threads == 1 ? panels : (panels + 2 * per_block - 1) / (2 * per_block) * 2;
        runs_ = (panels + run_ - 1) / run_;
    }

    long count() const { return blocks_ * runs_; }

    void compute(long i) const {
        switch (op_.w->dtype) {
            case Dtype::f32: return compute<float>(i);
            case Dtype::bf16: return compute<bf16>(i);
            case Dtype::f16: return compute<f16>(i);
            case Dtype::bf12: return compute<bf12>(i);
        }
    }

private:
    template <class T> void compute(long i) const {
        const long b = i / runs_, panel = i % runs_ * run_, begin = rows_ * b / blocks_;
        block<T>(op_, begin, rows_ * (b + 1) / blocks_ - begin, panel, std::min(panel + run_, op_.w->panels()));
    }

    const LinearOp& op_;
    const long rows_;
    long blocks_, run_, runs_;
};

}  // namespace

void multiply_all(std::span<const Multiply> all, int threads) {
    std::vector<Items> items;
    std::vector<long> ends;
    for (const auto& [op, rows] : all) {
        const Items& added = items.emplace_back(op, rows, threads);
        ends.push_back(added.count() + (ends.empty() ? 0 : ends.back()));
    }
    parallel(threads, ends.empty() ? 0 : ends.back(), [&](long i) {
        const long at = std::ranges::upper_bound(ends, i) - ends.begin();
        items[at].compute(i - (at == 0 ? 0 : ends[at - 1]));
    });
}

}  // namespace shoal::SHOAL_ISA

using namespace shoal;

SHOAL_EXPORT(shoal_linear)(const void* op, const Rows* rows, int threads) {
    const SHOAL_ISA::Items items(*static_cast<const LinearOp*>(op), rows->count, threads);
    parallel(threads, items.count(), [&](long i) { items.compute(i); });
    return 0;
}
