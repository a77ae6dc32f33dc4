// The small operations of a decoder layer. A row's bits depend on that row only.
#include <algorithm>
#include <cstring>

#include "lanes.h"
#include "ops.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

// To the nearest bfloat16, ties to even; NaN stays NaN.
uint16_t narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T> void gather(const GatherOp& op, long rows, int threads) {
    parallel_rows(threads, rows, op.size, [&](long t) {
        const T* from = static_cast<const T*>(op.table) + op.ids[t] * op.table_stride;
        float* to = op.out + t * op.out_stride;
        long i = 0;
        for (; i + LANES <= op.size; i += LANES) store(to + i, load(from + i));
        T rest[LANES] = {};
        std::copy(from + i, from + op.size, rest);
        store_part(to + i, load(rest), op.size - i);
    });
}

// Element i of x adds to lane i % 16 in order; the fixed tree closes the sum.
void rms_norm(const float* x, const float* weight, float* out, long size, float eps) {
    V squares = splat(0);
    for (long i = 0; i < size; i += LANES) {
        const V v = load_part(x + i, size - i);
        squares = fma(v, v, squares);
    }
    const V scale = splat(1.f / std::sqrt(sum(squares) / float(size) + eps));
    for (long i = 0; i < size; i += LANES)
        store_part(out + i, load_part(x + i, size - i) * scale * load_part(weight + i, size - i), size - i);
}

void rotate(float* x, const float* cosines, const float* sines, long half) {
    for (long i = 0; i < half; i += LANES) {
        const long n = half - i;
        const V a = load_part(x + i, n), b = load_part(x + half + i, n);
        const V c = load_part(cosines + i, n), s = load_part(sines + i, n);
        store_part(x + i, fma(a, c, splat(0) - b * s), n);
        store_part(x + half + i, fma(b, c, a * s), n);
    }
}

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;
using namespace shoal::SHOAL_ISA;

SHOAL_EXPORT(shoal_gather)(const void* op, const Rows* rows, int threads) {
    const auto& gather = *static_cast<const GatherOp*>(op);
    for (long t = 0; t < rows->count; t++)
        if (gather.ids[t] < 0 || gather.ids[t] >= gather.table_rows) return 1;
    switch (gather.dtype) {
        case Dtype::f32: SHOAL_ISA::gather<float>(gather, rows->count, threads); break;
        case Dtype::bf16: SHOAL_ISA::gather<bf16>(gather, rows->count, threads); break;
        case Dtype::f16: SHOAL_ISA::gather<f16>(gather, rows->count, threads); break;
        case Dtype::bf12: return 1;  // of matrices only
    }
    return 0;
}

SHOAL_EXPORT(shoal_rms_norm)(const void* op, const Rows* rows, int threads) {
    const auto [x, x_stride, weight, out, out_stride, heads, size, eps] = *static_cast<const RmsNormOp*>(op);
    parallel_rows(threads, rows->count, heads * size, [=](long t) {
        for (long h = 0; h < heads; h++)
            rms_norm(x + t * x_stride + h * size, weight, out + t * out_stride + h * size, size, eps);
    });
    return 0;
}

SHOAL_EXPORT(shoal_rotate)(const void* op, const Rows* rows, int threads) {
    const auto [x, x_stride, heads, head_size, cosines, sines, positions, half] = *static_cast<const RotateOp*>(op);
    for (long t = 0; t < rows->count; t++)
        if (rows->position[t] < 0 || rows->position[t] >= positions) return 1;
    parallel_rows(threads, rows->count, heads * head_size, [=](long t) {
        const long angle = rows->position[t] * half;
        for (long h = 0; h < heads; h++)
            rotate(x + t * x_stride + h * head_size, cosines + angle, sines + angle, half);
    });
    return 0;
}

SHOAL_EXPORT(shoal_store)(const void* op, const Rows* rows, int threads) {
    const auto [k, k_stride, v, v_stride, pool, ring] = *static_cast<const StoreOp*>(op);
    if (ring ? !rows->fit(*ring) : !rows->fit(*pool)) return 1;
    const long size = long(pool->heads) * pool->head_size;
    auto write = [=](void* to, long at, const float* from) {
        if (pool->is_bf16)
            for (long i = 0; i < size; i++) static_cast<uint16_t*>(to)[at + i] = narrow(from[i]);
        else
            std::memcpy(static_cast<float*>(to) + at, from, size * sizeof(float));
    };
    parallel_rows(threads, rows->count, 2 * size, [=](long t) {
        if (ring) {
            write(ring->k, t * size, k + t * k_stride);
            write(ring->v, t * size, v + t * v_stride);
            return;
        }
        const long sequence = rows->sequence[t], position = rows->position[t];
        if (rows->store_from && position < rows->store_from[sequence]) return;
        const long block = rows->block(sequence, position / pool->block_rows);
        const long offset = position % pool->block_rows * size;
        write(pool->k, block * pool->k_stride + offset, k + t * k_stride);
        write(pool->v, block * pool->v_stride + offset, v + t * v_stride);
    });
    return 0;
}
