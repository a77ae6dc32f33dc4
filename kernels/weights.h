// How a matrix lies in memory once packed.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

namespace shoal {

enum class Dtype : int { f32, bf16, f16 };

// A [num_outputs, num_inputs] matrix, or two of them (gate and up), in panels of 16 outputs.
//
// Panels lie in pairs that alternate every four k: [pair][k / 4][2][4][16]. One row reads both panels of a pair as a
// single stream; many rows read whole cache lines of one panel. Two bf16 of neighbouring k share a 32-bit word (even k
// low), so one shift or one mask widens a whole vector. In a gate-up matrix even panels are gate, odd ones up. What
// pads k, the last panel and the last pair is zero.
struct Linear {
    Dtype dtype;
    long num_outputs, num_inputs;
    bool gate_up;
    std::shared_ptr<char> data;
    std::vector<float> bias;  // [panels, 16], added to finished sums; empty: none

    long panels() const { return gate_up ? (num_outputs + 15) / 16 * 2 : (num_outputs + 15) / 16; }
    long pair_size() const { return (num_inputs + 3) / 4 * 128; }  // in elements
    long panel_offset(long panel) const { return panel / 2 * pair_size() + panel % 2 * 64; }
    long element_size() const { return dtype == Dtype::f32 ? 4 : 2; }
    long num_bytes() const { return (panels() + 1) / 2 * pair_size() * element_size() + long(bias.size()) * 4; }
};

}  // namespace shoal
