// How a matrix lies in memory once packed.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace shoal {

enum class Dtype : int { f32, bf16, f16, bf12 };

// A [num_outputs, num_inputs] matrix, or two of them (gate and up), in panels of 16 outputs.
//
// Panels lie in pairs that alternate every four k: [pair][k / 4][2][4][16]. One row reads both panels of a pair as a
// single stream; many rows read whole cache lines of one panel. Two bf16 of neighbouring k share a 32-bit word (even k
// low), so one shift or one mask widens a whole vector. In a gate-up matrix even panels are gate, odd ones up. What
// pads k, the last panel and the last pair is zero.
//
// bf12 is bf16 in 12 bits, without loss. A step of few rows takes as long as memory takes to bring the weights, and the
// high bytes of trained ones (sign, seven bits of exponent) say little: 16 of the 256 make up all but some 0.02% of a
// pair. So four k of a pair are [2][64] low bytes, then [64]: where the high bytes stand in the pair's table, the even
// panel's in the low four bits, the odd one's in the high. Byte (lane / 4) * 16 + (k / 2) * 8 + (lane % 4) * 2 + k % 2
// of 64 is where unpacking wants it. Fours that have a rarer high byte lie apart, as bf16.
struct Linear {
    Dtype dtype;
    long num_outputs, num_inputs;
    bool gate_up;
    std::shared_ptr<char> data;
    std::vector<float> bias;  // [panels, 16], added to finished sums; empty: none

    struct Rare {
        long four;
        uint16_t values[2 * 4 * 16];
    };
    struct Pair {
        uint8_t table[16];
        std::vector<Rare> rare;  // ascending

        std::span<const Rare> rare_within(long begin, long end) const {
            const auto first = std::ranges::lower_bound(rare, begin, {}, &Rare::four);
            return {first, std::ranges::lower_bound(first, rare.end(), end, {}, &Rare::four)};
        }
    };
    std::vector<Pair> pairs;  // of bf12

    long panels() const { return gate_up ? (num_outputs + 15) / 16 * 2 : (num_outputs + 15) / 16; }
    long fours() const { return (num_inputs + 3) / 4; }
    long four_bytes() const { return dtype == Dtype::f32 ? 512 : dtype == Dtype::bf12 ? 192 : 256; }  // of a pair
    long pair_bytes() const { return fours() * four_bytes(); }
    long data_bytes() const { return (panels() + 1) / 2 * pair_bytes(); }
    long num_bytes() const {
        long bytes = data_bytes() + long(bias.size()) * 4;
        for (const auto& pair : pairs) bytes += sizeof pair + pair.rare.capacity() * sizeof(Rare);
        return bytes;
    }
};

}  // namespace shoal
