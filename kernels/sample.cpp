// Drawing one token a row. reference.py says the same in a few lines of torch; here it costs no sort.
//
//   temperature 0: the largest logit, the lowest id among equals; NaN never wins. Else
//   weight w = 2^((x - largest) * (log2 e / temperature)) in float32, rounded to a multiple of 2^-34; NaN weighs 0
//   top_k    : keeps the k first by (weight descending, id ascending)
//   top_p    : keeps the fewest first ones whose weight reaches top_p * the weight left by top_k
//   token    : the first id, ascending, at which the running sum of kept weight exceeds u * all kept weight,
//              u in [0, 1) drawn from (seed, position) alone
//
// A multiple of 2^-34 up to 1, summed up to 2^19 times, is an exact double: sums have one value however they are taken.
#include <algorithm>
#include <numeric>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace shoal::SHOAL_ISA {
namespace {

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 53 bits from a key and a counter.
double uniform(uint64_t key, uint64_t counter) {
    uint32_t x[4] = {uint32_t(counter), uint32_t(counter >> 32), 0, 0}, k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const uint64_t a = uint64_t(x[0]) * 0xD2511F53, b = uint64_t(x[2]) * 0xCD9E8D57;
        const uint32_t y[4] = {uint32_t(b >> 32) ^ x[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ x[3] ^ k1, uint32_t(a)};
        std::copy_n(y, 4, x);
    }
    return double((uint64_t(x[1]) << 32 | x[0]) >> 11) * 0x1p-53;
}

float largest_logit(const float* x, long n) {
    V best = splat(-INFINITY);
    for (long i = 0; i < n; i += LANES) best = max(load_part(x + i, n - i, -INFINITY), best);  // NaN loses on the left
    return largest(best);
}

// The first id from `i` on whose value is `wanted`; n if there is none.
long find(const float* x, long i, long n, float wanted) {
    while (i + LANES <= n && !any_equal(load(x + i), splat(wanted))) i += LANES;
    while (i < n && x[i] != wanted) i++;
    return i;
}

long greedy(const float* x, long n, float best) {
    const long id = find(x, 0, n, best);
    return id < n ? id : 0;  // every logit is NaN
}

// Weights of n logits, padded with zeros.
void weigh(const float* x, long n, long padded, float best, float scale, float* w) {
    const V coarse = splat(0x1p-11f);  // from here on a float32 is a multiple of 2^-34; adding it rounds smaller ones
    for (long i = 0; i < padded; i += LANES) {
        V v = exp2((load_part(x + i, n - i, -INFINITY) - splat(best)) * splat(scale));
        v = if_less(v, coarse, (v + coarse) - coarse, v);
        store(w + i, if_less(v, splat(2), v, splat(0)));          // NaN is not less
    }
}

// What a set of weights amounts to: its weight for top_p, its size for top_k.
struct Weight {
    static V of(V w) { return w; }
    static double of(float w) { return w; }
};
struct Count {
    static V of(V) { return splat(1); }
    static double of(float) { return 1; }
};

// The measure of w[0..n) above `floor`.
template <class Measure> double measure(const float* w, long n, float floor) {
    Sums sums = no_sums();
    for (long i = 0; i < n; i += LANES) {
        const V v = load(w + i);
        sums = sums + if_less(splat(floor), v, Measure::of(v), splat(0));
    }
    double lanes[LANES];
    store(lanes, sums);
    return std::accumulate(lanes, lanes + LANES, 0.0);
}
double mass(const float* w, long n) { return measure<Weight>(w, n, 0); }

// Weights that can matter: those above the first of 2^-4, 2^-8, .. that has enough above it. Few, as a rule.
template <class Measure> long collect(const float* w, long n, double need, float* out) {
    float floor = 0x1p-4f;
    while (floor > 0x1p-36f && measure<Measure>(w, n, floor) < need) floor *= 0x1p-4f;
    long count = 0;
    for (long i = 0; i < n; i += LANES)
        if (any_less(splat(floor), load(w + i)))
            for (long j = i; j < i + LANES; j++) {
                out[count] = w[j];
                count += w[j] > floor;
            }
    return count;
}

// Keeps the fewest weights, larger ones and then lower ids first, whose measure reaches `need`; zeroes the others.
//
// The bits of a weight order like the weight, so the last weight kept is found digit by digit: the measures of a
// digit's bins say in which bin it lies, and only the weights in that bin have a next digit to look at.
template <class Measure> void keep(float* w, long n, double need, std::vector<float>& scratch) {
    constexpr int BINS = 256, TURNS = 4;  // several copies of each bin: adding to one in a row would wait for itself
    scratch.resize(n);
    float* candidates = scratch.data();
    long count = collect<Measure>(w, n, need, candidates);
    uint32_t last = 0;
    double above = 0, equal = 0;          // measures of the weights larger than those in the bin, and of those
    for (int shift : {22, 14, 6, 0}) {    // 30 bits hold a weight of at most 1
        auto digit = [=](float weight) { return std::bit_cast<uint32_t>(weight) >> shift & (shift ? BINS - 1 : 63); };
        double bins[TURNS][BINS] = {};
        for (long i = 0; i < count; i++) bins[i % TURNS][digit(candidates[i])] += Measure::of(candidates[i]);
        uint32_t bin = BINS;
        equal = 0;
        do {
            above += equal, bin--;
            equal = bins[0][bin] + bins[1][bin] + bins[2][bin] + bins[3][bin];
        } while (bin > 0 && above + equal < need);
        last |= bin << shift;
        long same = 0;
        for (long i = 0; i < count; i++) {
            candidates[same] = candidates[i];
            same += digit(candidates[i]) == bin;
        }
        count = same;
    }
    const float smallest = std::bit_cast<float>(last);
    for (long i = 0; i < n; i += LANES) store(w + i, if_less(load(w + i), splat(smallest), splat(0), load(w + i)));
    const double each = Measure::of(smallest);
    if (above + equal - each < need) return;  // all that weigh the same are kept
    for (long i = find(w, 0, n, smallest); i < n; i = find(w, i + 1, n, smallest))
        if (above < need)
            above += each;
        else
            w[i] = 0;
}

// The first id whose running sum exceeds `target`, else the last one kept.
long draw(const float* w, long n, double target) {
    constexpr long BLOCK = 16 * LANES;
    double sum = 0;
    long i = 0, last = 0;
    for (; i + BLOCK < n; i += BLOCK) {
        const double more = mass(w + i, BLOCK);
        if (sum + more > target) break;
        sum += more;
    }
    for (; i < n; i++) {
        sum += w[i];
        if (sum > target) return i;
        if (w[i] > 0) last = i;
    }
    return last;
}

struct How {
    float temperature;
    int top_k;
    float top_p;
    int64_t seed, position;
};

long sample(const float* x, long n, const How& how) {
    const float best = largest_logit(x, n);
    if (!(how.temperature > 0)) return greedy(x, n, best);
    static thread_local std::vector<float> weights, scratch;
    const long padded = (n + LANES - 1) / LANES * LANES;
    weights.resize(padded);
    float* w = weights.data();
    weigh(x, n, padded, best, 1.4426950408889634f / how.temperature, w);
    if (how.top_k > 0 && how.top_k < n) keep<Count>(w, padded, how.top_k, scratch);
    double total = mass(w, padded);
    if (total > 0 && how.top_p < 1) {
        keep<Weight>(w, padded, how.top_p * total, scratch);
        total = mass(w, padded);
    }
    if (!(total > 0)) return greedy(x, n, best);  // infinite logits, or nothing but NaN
    return draw(w, n, uniform(how.seed, how.position) * total);
}

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;

SHOAL_EXPORT(shoal_sample)(const float* logits, long stride, long rows, long vocabulary, const float* temperature,
                           const int* top_k, const float* top_p, const int64_t* seed, const int64_t* position,
                           int64_t* out, int threads) {
    parallel(threads, rows, [=](long t) {
        out[t] = SHOAL_ISA::sample(logits + t * stride, vocabulary,
                                   {temperature[t], top_k[t], top_p[t], seed[t], position[t]});
    });
    return 0;
}
