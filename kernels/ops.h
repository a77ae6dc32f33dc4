// The operations of a decoder step as data: a kernel is called with one of these, where the step's rows stand, and a
// number of threads. Mirrored by ctypes in library.py.
#pragma once
#include "paged.h"
#include "weights.h"

namespace shoal {

// 1 means that a row's position, sequence, block, slot or segment is out of range; nothing was written then.
using Kernel = int (*)(const void* op, const Rows* rows, int threads);

// What becomes of the two products of a gate-up matrix: see `gated` in linear.cpp.
enum class Gate : int { silu, gelu_tanh, clamped_swiglu };

struct LinearOp {  // y = x w^T, plus bias; gated where w is a gate-up matrix; added to y
    const Linear* w;
    const float* x;
    long x_stride;
    float* y;
    long y_stride;
    int add;
    Gate gate;
};

struct ExpertsOp {  // y += what the experts make of x, each row's `top` best by its router's logits
    const float* x;
    long x_stride;
    const float* logits;  // [rows, experts]
    long logits_stride;
    const Linear *const *gate_up, *const *down;  // [experts]
    float* y;
    long y_stride;
    int experts, top;
    Gate gate;
};

struct GatherOp {  // out[t] = table[ids[t]] * scale, widened
    const void* table;
    long table_stride, table_rows;
    Dtype dtype;
    const long* ids;
    float* out;
    long out_stride, size;
    float scale;
};

struct RmsNormOp {  // out = x / sqrt(mean(x^2) + eps) * weight, of each of a row's heads by itself; added to out
    const float* x;
    long x_stride;
    const float* weight;
    float* out;
    long out_stride, heads, size;  // a row's [heads, size] contiguous
    float eps;
    int add;
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
    const float* sinks;  // [q_heads]: a logit of each head that has no value; null: none
};

struct RingOp {  // restore: the named segments to their slots; capture: rows to the named segments; commit: the step's
    const Ring* ring;  // own rows to their slots, as many as fit
};

struct RecurrenceOp {  // a state S [key_size, value_size] of each head, which each row of a sequence changes in turn
    const float* q;
    long q_stride;
    const float* k;
    long k_stride;  // of both a row's [key_heads, key_size] contiguous
    const float* v;
    long v_stride;
    const float *decay, *beta;  // [rows, heads]; beta null: no delta rule
    float* out;
    long out_stride;  // as of v: a row's [heads, value_size] contiguous
    float* slots;
    long slot_stride, num_slots;  // [heads, key_size, value_size] contiguous
    float* segments;
    long segment_stride, num_segments;
    int key_heads, heads, key_size, value_size;
};

}  // namespace shoal
