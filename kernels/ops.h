// The operations of a decoder step as data: a kernel is called with one of these, where the step's rows stand, and a
// number of threads. Mirrored by ctypes in library.py.
#pragma once
#include "paged.h"
#include "weights.h"

namespace shoal {

// 1 means that a row's position, sequence, block, slot or segment is out of range; nothing was written then.
using Kernel = int (*)(const void* op, const Rows* rows, int threads);

struct LinearOp {  // y = x w^T, plus bias; silu(gate) * up of a gate-up matrix; added to y
    const Linear* w;
    const float* x;
    long x_stride;
    float* y;
    long y_stride;
    int add;
};

struct GatherOp {  // out[t] = table[ids[t]], widened
    const void* table;
    long table_stride, table_rows;
    Dtype dtype;
    const long* ids;
    float* out;
    long out_stride, size;
};

struct RmsNormOp {  // out = x / sqrt(mean(x^2) + eps) * weight, of each of a row's heads by itself
    const float* x;
    long x_stride;
    const float* weight;
    float* out;
    long out_stride, heads, size;  // a row's [heads, size] contiguous
    float eps;
};

struct RotateOp {  // pairs (i, i + half) of each head by its row's angle, in place
    float* x;
    long x_stride, heads, head_size;
    const float *cosines, *sines;  // [positions, half]
    long positions, half;
};

struct StoreOp {  // each row's keys and values to its place in the pool, or to the ring's own rows, in its type
    const float* k;
    long k_stride;
    const float* v;
    long v_stride;
    const Pool* pool;  // of a ring: its slots
    const Ring* ring;  // null: rows are paged
};

struct AttentionOp {
    const float* q;
    long q_stride;
    const Pool* pool;  // of a ring: its slots
    const Ring* ring;  // null: rows are paged
    float* out;
    long out_stride;
    int q_heads;
    int window;  // a row sees so many positions, its own the last; 0: all
    float scale;
};

struct RingOp {  // restore: the named segments to their slots; capture: rows to the named segments; commit: the step's
    const Ring* ring;  // own rows to their slots, as many as fit
};

}  // namespace shoal
