// y[T, N] = x[T, K] w[N, K]^T for float32 activations and float32, bfloat16 or float16 weights.
//
// Every y[t][n] is the float32 chain
//     acc = 0; for k in 0..K-1: acc = fma(x[t][k], w[n][k], acc)
// plus a bias if the matrix has one, and nothing else: no tile, thread count, row count or instruction set shows in the
// bits. This works because vector lanes run over n (outputs), never over k: each step broadcasts one x and does one fma
// a lane. What a caller asks for beside (silu, a product, a residual) takes the finished sum.
#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "ops.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

constexpr int ACCUMULATORS = REGISTERS == 32 ? 24 : REGISTERS == 8 ? 6 : 1;
constexpr long panels_per_tile(long rows) {
    return REGISTERS == 32 ? (rows <= 6 ? 4 : 2) : REGISTERS == 8 ? (rows <= 3 ? 2 : 1) : 1;
}
constexpr long MAX_ROWS = 48;  // rows of a work item: its x stays in L2
constexpr long DEPTH = 768;    // k of one pass: a panel's weights stay in L1
constexpr long GROUP = 4;      // panels between two epilogues

// Weights that later tiles will want, and how often (once in `every` groups of four k) to ask for a piece.
template <class T> struct Ahead { const T* at; int every; };

// The weights of step `sub` (k % 4) of one group of four k.
template <int sub> V load_weights(const float* w) { return load(w + sub * LANES); }
template <int sub> V load_weights(const f16* w) { return load(w + sub * LANES); }
template <int sub> V load_weights(const bf16* w) {
    const auto words = load_words(w + sub / 2 * 2 * LANES);
    return sub % 2 ? odd(words) : even(words);
}

// sums[p][r] += x[r][k] * w[p][k] for k = 0..depth-1 in order: R rows by P panels held in registers. Sums are exact
// float32, so taking k in several passes changes no bit.
template <class T, int R, int P>
[[gnu::noinline]] void tile(const T* w, long pair_size, const float* x, long x_stride, long depth, float* sums,
                            long panel_stride, bool first_pass, Ahead<T> ahead) {
    V acc[R][P];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++)
            acc[r][p] = first_pass ? splat(0) : load(sums + p * panel_stride + r * LANES);

    // A register that all panels of a step multiply with one x is free again for the next x: 24 sums, the weights and
    // one x fit. Three rows to a pointer are what an address can reach without arithmetic.
    const float* rows[(R + 2) / 3];
    UNROLL for (int i = 0; i < (R + 2) / 3; i++) rows[i] = x + 3 * i * x_stride;
    auto step = [&]<int sub>(std::integral_constant<int, sub>) __attribute__((always_inline)) {
        V weights[P];
        UNROLL for (int p = 0; p < P; p++) weights[p] = load_weights<sub>(w + p / 2 * pair_size + p % 2 * 64);
        UNROLL for (int r = 0; r < R; r++) {
            const V xs = splat(rows[r / 3][r % 3 * x_stride + sub]);
            UNROLL for (int p = 0; p < P; p++) fma_into(acc[r][p], xs, weights[p]);
        }
    };
    constexpr std::integral_constant<int, 0> k0;
    constexpr std::integral_constant<int, 1> k1;
    constexpr std::integral_constant<int, 2> k2;
    constexpr std::integral_constant<int, 3> k3;
    long left = depth;
    for (int wait = ahead.every; left >= 4; left -= 4, w += 128) {
        if (--wait == 0) {
            UNROLL for (int p = 0; p < P; p++)
                UNROLL for (int i = 0; i < 64; i += 64 / int(sizeof(T)))
                    __builtin_prefetch(ahead.at + p / 2 * pair_size + p % 2 * 64 + i, 0, 2);
            ahead.at += 128, wait = ahead.every;
        }
        step(k0), step(k1), step(k2), step(k3);
        UNROLL for (auto& row : rows) row += 4, hold(row);
    }
    if (left > 0) step(k0);
    if (left > 1) step(k1);
    if (left > 2) step(k2);

    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++) store(sums + p * panel_stride + r * LANES, acc[r][p]);
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
    return panels == 4 ? tile_of<T, 4>(rows) : panels == 2 ? tile_of<T, 2>(rows) : tile_of<T, 1>(rows);
}

// All k of `panels` panels from `panel` on, for x's rows.
template <class T>
void multiply(const Linear& w, long panel, long panels, const float* x, long x_stride, long rows, float* sums) {
    const long tiles = (rows * panels_per_tile(rows) + ACCUMULATORS - 1) / ACCUMULATORS;
    const T* data = reinterpret_cast<const T*>(w.data.get()) + w.panel_offset(panel);
    const long next = w.panel_offset(panel + panels) - w.panel_offset(panel);
    // Several tiles take turns to fetch the next panels. A single tile of whole pairs is one sequential stream: cores
    // with AVX-512 gain 10 to 30% when asked 8 KB ahead, the hardware prefetcher of AVX2 ones does better unasked.
    const bool stream = panels > 1 && tiles == 1;
    const int every = stream ? REGISTERS == 32 : int(tiles);
    for (long k = 0; k < w.num_inputs; k += DEPTH) {
        const long depth = std::min(DEPTH, w.num_inputs - k);
        const T* weights = data + k * 32;
        for (long i = 0, row = 0; i < tiles; i++) {  // near-equal tiles
            const long height = rows / tiles + (i < rows % tiles);
            const T* ahead = weights + (stream ? 32 * 128 : next + depth * i / tiles / 4 * 128);
            tile_of<T>(height, panels)(weights, w.pair_size(), x + row * x_stride + k, x_stride, depth,
                                       sums + row * LANES, rows * LANES, k == 0, {ahead, every});
            row += height;
        }
    }
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
            if (c.w->gate_up) v = silu(v) * up;
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
            long together = std::min(panels_per_tile(rows), panels - p);
            if (together == 3) together = 2;
            multiply<T>(*c.w, group + p, together, c.x + row * c.x_stride, c.x_stride, rows,
                        sums + p * rows * LANES);
            p += together;
        }
        finish(c, group, panels, row, rows, sums);
    }
}

template <class T> void run(const LinearOp& c, long rows, int threads) {
    // Work items: blocks of rows by runs of panels, an even number each.
    const long panels = c.w->panels(), blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    long run = blocks > 1 ? 12 : std::max(2L, panels / threads / 2 * 2);
    if (threads == 1) run = panels;
    const long runs = (panels + run - 1) / run;
    parallel(threads, blocks * runs, [&](long i) {
        const long b = i / runs, panel = i % runs * run, begin = rows * b / blocks, end = rows * (b + 1) / blocks;
        block<T>(c, begin, end - begin, panel, std::min(panel + run, panels));
    });
}

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;

SHOAL_EXPORT(shoal_linear)(const void* op, const Rows* rows, int threads) {
    const auto& linear = *static_cast<const LinearOp*>(op);
    switch (linear.w->dtype) {
        case Dtype::f32: SHOAL_ISA::run<float>(linear, rows->count, threads); break;
        case Dtype::bf16: SHOAL_ISA::run<SHOAL_ISA::bf16>(linear, rows->count, threads); break;
        case Dtype::f16: SHOAL_ISA::run<SHOAL_ISA::f16>(linear, rows->count, threads); break;
    }
    return 0;
}
