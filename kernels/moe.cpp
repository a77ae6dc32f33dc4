// A mixture of experts: each row's `top` best experts, weighted, added to y.
//
// What fixes the bits of a row: of its router's logits the largest come first, the lower id first among equals. Their
// weights are 2^((logit - largest) log2 e) over their sum, taken in that order (a softmax over the chosen alone). What
// an expert makes of the row is two linears, whose bits linear.cpp fixes. In that order again
//     sum = w_0 o_0, then sum = fma(w_i, o_i, sum); y = y + sum
// so neither other rows, nor which of them share an expert, show in the bits.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "lanes.h"
#include "linear.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

void choose(const float* logits, int experts, int top, int* chosen, float* weights) {
    for (int i = 0; i < top; i++) {
        int best = -1;
        for (int e = 0; e < experts; e++)
            if (std::find(chosen, chosen + i, e) == chosen + i && (best < 0 || logits[e] > logits[best])) best = e;
        chosen[i] = best;
    }
    float sum = 0;
    for (int i = 0; i < top; i++) {
        weights[i] = exp2((logits[chosen[i]] - logits[chosen[0]]) * 1.4426950408889634f);
        sum = sum + weights[i];
    }
    for (int i = 0; i < top; i++) weights[i] = weights[i] / sum;
}

// A pick is one of a row's `top` experts: pick t * top + i is row t's i-th best.
class Picks {
public:
    Picks(const ExpertsOp& op, long rows, int threads)
        : experts(rows * op.top), weights(rows * op.top), places(rows * op.top), begins(op.experts + 1) {
        parallel_rows(threads, rows, op.experts * op.top, [&](long t) {
            const long first = t * op.top;
            choose(op.logits + t * op.logits_stride, op.experts, op.top, &experts[first], &weights[first]);
        });
        for (const int e : experts) begins[e + 1]++;
        for (int e = 0; e < op.experts; e++) begins[e + 1] += begins[e];
        auto next = begins;
        for (size_t i = 0; i < places.size(); i++) places[i] = next[experts[i]]++;
    }

    std::vector<int> experts;
    std::vector<float> weights;
    std::vector<long> places;  // side by side for each expert, in the order of their rows
    std::vector<long> begins;  // of each expert's places
};

// y = x w^T of each expert that was picked, over rows in the order of places.
void multiply_picked(const Linear* const* w, const Picks& picks, const float* x, float* y, Gate gate, int threads) {
    std::vector<Multiply> all;
    for (size_t e = 0; e + 1 < picks.begins.size(); e++) {
        const long begin = picks.begins[e], rows = picks.begins[e + 1] - begin;
        const long inputs = w[e]->num_inputs, outputs = w[e]->num_outputs;
        if (rows) all.push_back({{w[e], x + begin * inputs, inputs, y + begin * outputs, outputs, 0, gate}, rows});
    }
    multiply_all(all, threads);
}

// Adds a row's outputs, which lie at its places.
void combine(const float* outputs, long size, const long* places, const float* weights, int top, float* y) {
    for (long d = 0; d < size; d += LANES) {
        const long n = size - d;
        V sum = splat(weights[0]) * load_part(outputs + places[0] * size + d, n);
        for (int i = 1; i < top; i++) sum = fma(splat(weights[i]), load_part(outputs + places[i] * size + d, n), sum);
        store_part(y + d, load_part(y + d, n) + sum, n);
    }
}

void run(const ExpertsOp& op, long rows, int threads) {
    const Picks picks(op, rows, threads);
    const long count = rows * op.top, size = op.gate_up[0]->num_inputs, inner_size = op.gate_up[0]->num_outputs;
    const auto x = std::make_unique_for_overwrite<float[]>(count * size);  // inputs, then outputs
    const auto inner = std::make_unique_for_overwrite<float[]>(count * inner_size);
    parallel_rows(threads, count, size, [&](long i) {
        std::memcpy(&x[picks.places[i] * size], op.x + i / op.top * op.x_stride, size * sizeof(float));
    });
    multiply_picked(op.gate_up, picks, x.get(), inner.get(), op.gate, threads);
    multiply_picked(op.down, picks, inner.get(), x.get(), op.gate, threads);
    parallel_rows(threads, rows, size * op.top, [&](long t) {
        const long first = t * op.top;
        combine(x.get(), size, &picks.places[first], &picks.weights[first], op.top, op.y + t * op.y_stride);
    });
}

}  // namespace
}  // namespace shoal::SHOAL_ISA

SHOAL_EXPORT(shoal_experts)(const void* op, const shoal::Rows* rows, int threads) {
    if (rows->count) shoal::SHOAL_ISA::run(*static_cast<const shoal::ExpertsOp*>(op), rows->count, threads);
    return 0;
}
