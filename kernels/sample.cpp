// Drawing one token a row, and saying how likely a token was. reference.py says the same in a few lines of torch; here
// it costs no sort.
//
// A row may first be adjusted, each step in float32, in the order of vLLM:
//   bias       : x[id] += bias, pair by pair; -infinity forbids a token
//   repetition : of every id in prompt or output, once: x > 0 ? x / repetition : x * repetition
//   frequency  : x[id] -= frequency * how often the output has the id
//   presence   : x[id] -= presence if the output has the id
// Then the draw:
//   temperature 0: the largest logit, the lowest id among equals; NaN never wins. Else
//   weight w = 2^((x - largest) * (log2 e / temperature)) in float32, rounded to a multiple of 2^-34; NaN weighs 0
//   min_p    : keeps what weighs at least min_p; the largest logit weighs 1
//   top_k    : keeps the k first by (weight descending, id ascending)
//   top_p    : keeps the fewest first ones whose weight reaches top_p * the weight left by min_p and top_k
//   token    : the first id, ascending, at which the running sum of kept weight exceeds u * all kept weight,
//              u in [0, 1) drawn from (seed, position) alone
// And the logarithm of a token's share, of logits that are not adjusted:
//   logprob  : (x - largest) - ln(sum of w at temperature 1) in double; -infinity for NaN, and for every token where
//              there is no sum, that is no finite largest logit
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

constexpr float LOG2_E = 1.4426950408889634f;

inline V weight(V x, float best, float scale) {
    const V coarse = splat(0x1p-11f);  // from here on a float32 is a multiple of 2^-34; adding it rounds smaller ones
    V v = exp2((x - splat(best)) * splat(scale));
    v = if_less(v, coarse, (v + coarse) - coarse, v);
    return if_less(v, splat(2), v, splat(0));  // NaN is not less
}

// Weights of n logits, padded with zeros.
void weigh(const float* x, long n, long padded, float best, float scale, float* w) {
    for (long i = 0; i < padded; i += LANES) store(w + i, weight(load_part(x + i, n - i, -INFINITY), best, scale));
}

void zero_below(float least, float* w, long n) {
    for (long i = 0; i < n; i += LANES) store(w + i, if_less(load(w + i), splat(least), splat(0), load(w + i)));
}

double total(Sums sums) {
    double lanes[LANES];
    store(lanes, sums);
    return std::accumulate(lanes, lanes + LANES, 0.0);
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
    return total(sums);
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
    zero_below(smallest, w, n);
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
    float top_p, min_p;
    int64_t seed, position;
};

long sample(const float* x, long n, const How& how) {
    const float best = largest_logit(x, n);
    if (!(how.temperature > 0)) return greedy(x, n, best);
    static thread_local std::vector<float> weights, scratch;
    const long padded = (n + LANES - 1) / LANES * LANES;
    weights.resize(padded);
    float* w = weights.data();
    weigh(x, n, padded, best, LOG2_E / how.temperature, w);
    if (how.min_p > 0) zero_below(how.min_p, w, padded);
    if (how.top_k > 0 && how.top_k < n) keep<Count>(w, padded, how.top_k, scratch);
    double total = mass(w, padded);
    if (total > 0 && how.top_p < 1) {
        keep<Weight>(w, padded, how.top_p * total, scratch);
        total = mass(w, padded);
    }
    if (!(total > 0)) return greedy(x, n, best);  // infinite logits, or nothing but NaN
    return draw(w, n, uniform(how.seed, how.position) * total);
}

// What one row of logits is changed by; `Adjustment` of library.py.
struct Adjustment {
    long row;
    const int64_t* tokens;  // prompt, then output
    long count, prompt;
    float repetition, frequency, presence;
    const int64_t* bias_ids;
    const float* bias;
    long biases;
};

// An adjusted copy of n logits, valid until the thread's next; null if an id is outside. Costs one copy and a few
// operations for each token of the sequence.
const float* adjusted(const float* logits, long n, const Adjustment& by) {
    auto outside = [n](int64_t id) { return id < 0 || id >= n; };
    if (std::any_of(by.tokens, by.tokens + by.count, outside)) return nullptr;
    if (std::any_of(by.bias_ids, by.bias_ids + by.biases, outside)) return nullptr;

    static thread_local std::vector<float> copy;
    copy.assign(logits, logits + n);
    float* x = copy.data();
    for (long i = 0; i < by.biases; i++) x[by.bias_ids[i]] += by.bias[i];

    static thread_local std::vector<uint32_t> marks;    // of each id: how often the output has it; zeros between calls
    static thread_local std::vector<int64_t> distinct;  // the ids that have a mark
    constexpr uint32_t IN_PROMPT = 1u << 31;
    if (long(marks.size()) < n) marks.resize(n);
    distinct.resize(by.count + 1);
    long num_distinct = 0;
    auto note = [&, list = distinct.data()](int64_t id, bool is_new) {  // a branch would be guessed wrong too often
        list[num_distinct] = id;
        num_distinct += is_new;
    };
    const int64_t *end = by.tokens + by.count, *output = by.tokens + by.prompt;
    for (auto id = by.repetition == 1 ? output : by.tokens; id < output; id++) {
        note(*id, !marks[*id]);
        marks[*id] = IN_PROMPT;
    }
    for (auto id = output; id < end; id++) note(*id, !marks[*id]++);
    for (long i = 0; i < num_distinct; i++) {
        const int64_t id = distinct[i];
        const uint32_t drawn = marks[id] & ~IN_PROMPT;
        marks[id] = 0;
        float& v = x[id];
        v = v > 0 ? v / by.repetition : v * by.repetition;
        v -= by.frequency * float(drawn);
        v -= by.presence * float(drawn > 0);
    }
    return x;
}

// ln x for x >= 1, from the series of 2 artanh((m - 1) / (m + 1)): a libm's own differs with the machine.
double ln(double x) {
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < 0.7071067811865476) m *= 2, exponent--;
    const double s = (m - 1) / (m + 1), z = s * s;
    double series = 0;
    for (int k = 23; k > 0; k -= 2) series = series * z + 1.0 / k;
    return exponent * 0.6931471805599453 + 2 * s * series;
}

struct Candidate {
    float logit;  // NaN counts as -infinity
    long id;
};

// The `top` likeliest of n logits, likeliest first, lower ids first among equals.
void likeliest(const float* x, long n, long top, std::vector<Candidate>& out) {
    auto before = [](Candidate a, Candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); };
    out.clear();
    for (long i = 0; i < top; i++) out.push_back({x[i] == x[i] ? x[i] : -INFINITY, i});
    std::make_heap(out.begin(), out.end(), before);  // the last of them in front
    for (long i = top; top > 0 && i < n; i += LANES) {
        if (!any_less(splat(out.front().logit), load_part(x + i, n - i, -INFINITY))) continue;
        for (long j = i; j < std::min(i + LANES, n); j++)
            if (x[j] > out.front().logit) {
                std::pop_heap(out.begin(), out.end(), before);
                out.back() = {x[j], j};
                std::push_heap(out.begin(), out.end(), before);
            }
    }
    std::sort_heap(out.begin(), out.end(), before);
}

// Turns logits of one row into logprobs.
struct Distribution {
    float best;
    double ln_sum;

    Distribution(const float* x, long n) : best(largest_logit(x, n)) {
        Sums sums = no_sums();
        for (long i = 0; i < n; i += LANES)
            sums = sums + weight(load_part(x + i, n - i, -INFINITY), best, LOG2_E);
        const double sum = total(sums);
        ln_sum = sum > 0 ? ln(sum) : INFINITY;
    }
    double logprob(float x) const {
        const double p = double(x) - double(best) - ln_sum;
        return p == p ? p : -INFINITY;
    }
};

}  // namespace
}  // namespace shoal::SHOAL_ISA

using namespace shoal;

// 1: an adjustment's row or a token id is outside, or two adjustments are of one row.
SHOAL_EXPORT(shoal_sample)(const float* logits, long stride, long rows, long vocabulary, const float* temperature,
                           const int* top_k, const float* top_p, const float* min_p, const int64_t* seed,
                           const int64_t* position, const void* adjustments, long num_adjustments, int64_t* out,
                           int threads) {
    std::vector<const SHOAL_ISA::Adjustment*> by(rows);
    for (long i = 0; i < num_adjustments; i++) {
        const auto* one = static_cast<const SHOAL_ISA::Adjustment*>(adjustments) + i;
        if (one->row < 0 || one->row >= rows || by[one->row]) return 1;
        by[one->row] = one;
    }
    parallel(threads, rows, [&](long t) {
        const float* x = logits + t * stride;
        if (by[t]) x = SHOAL_ISA::adjusted(x, vocabulary, *by[t]);
        out[t] = x ? SHOAL_ISA::sample(x, vocabulary,
                                       {temperature[t], top_k[t], top_p[t], min_p[t], seed[t], position[t]})
                   : -1;
    });
    return std::find(out, out + rows, -1) < out + rows;
}

// Of `count` tokens, each with its row of logits. 1: a row or a token is outside. `top` is at most `vocabulary`.
SHOAL_EXPORT(shoal_logprobs)(const float* logits, long stride, long rows, long vocabulary, const int64_t* row,
                             const int64_t* token, long count, long top, double* logprob, int64_t* top_ids,
                             double* top_logprobs, int threads) {
    for (long t = 0; t < count; t++)
        if (row[t] < 0 || row[t] >= rows || token[t] < 0 || token[t] >= vocabulary) return 1;
    parallel(threads, count, [=](long t) {
        const float* x = logits + row[t] * stride;
        const SHOAL_ISA::Distribution distribution(x, vocabulary);
        logprob[t] = distribution.logprob(x[token[t]]);
        static thread_local std::vector<SHOAL_ISA::Candidate> first;
        SHOAL_ISA::likeliest(x, vocabulary, top, first);
        for (long k = 0; k < top; k++) {
            top_ids[t * top + k] = first[k].id;
            top_logprobs[t * top + k] = distribution.logprob(first[k].logit);
        }
    });
    return 0;
}
