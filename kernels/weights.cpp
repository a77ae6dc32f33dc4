// Weight memory, and packing into it. The layout is the same for every instruction set.
#include "weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>

#include "pool.h"

namespace shoal {
namespace {

constexpr long HUGE_PAGE = 2 << 20, ARENA = 32 << 20;

// Zeroed memory on huge pages. Most matrices are about as large as one huge page, so that a mapping each would leave
// them on small ones: they share arenas. An arena is unmapped when the last matrix in it is freed.
struct Arena {
    char* begin;
    long size, used = 0;

    explicit Arena(long bytes) : size((bytes + HUGE_PAGE - 1) & -HUGE_PAGE) {
        void* mapped = mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        begin = static_cast<char*>(mapped);
        const long skip = -reinterpret_cast<intptr_t>(begin) & (HUGE_PAGE - 1);
        if (skip) munmap(begin, skip);
        munmap(begin + skip + size, HUGE_PAGE - skip);
        begin += skip;
#if defined(MADV_HUGEPAGE)
        madvise(begin, size, MADV_HUGEPAGE);
#endif
    }
    ~Arena() { munmap(begin, size); }
    Arena(const Arena&) = delete;
};

std::shared_ptr<char> zeroed(long bytes) {
    static std::mutex mutex;
    static std::weak_ptr<Arena> latest;
    const std::lock_guard lock(mutex);
    bytes = (bytes + 4095) & -4096L;
    auto arena = latest.lock();
    if (!arena || arena->size - arena->used < bytes) latest = arena = std::make_shared<Arena>(std::max(bytes, ARENA));
    char* memory = arena->begin + arena->used;
    arena->used += bytes;
    return {std::move(arena), memory};
}

// Where a matrix lies until it is known how it will stay.
std::shared_ptr<char> staging(long bytes) {
    auto memory = static_cast<char*>(std::calloc(std::max(bytes, 1L), 1));
    if (!memory) throw std::bad_alloc();
    return {memory, std::free};
}

// Sixteen rows of w at a time, read in order and written to their lanes.
template <class T> void pack_panel(Linear& to, long panel, int lane0, const T* w, long stride, long rows) {
    T* out = reinterpret_cast<T*>(to.data.get() + panel / 2 * to.pair_bytes()) + panel % 2 * 64;
    for (long r = 0; r < rows; r++) {
        const T* row = w + r * stride;
        const long lane = lane0 + r;
        for (long k = 0; k < to.num_inputs; k++) {
            const long in_four = to.dtype == Dtype::bf16 ? k % 4 / 2 * 32 + lane * 2 + k % 2 : k % 4 * 16 + lane;
            out[k / 4 * 128 + in_four] = row[k];
        }
    }
}

constexpr long FOURS = 2 * 4 * 16;  // values of four k of a pair

// The 16 high bytes that most values of a pair have.
void choose_table(const uint16_t* values, long fours, uint8_t (&table)[16]) {
    long count[256] = {};
    for (long i = 0; i < fours * FOURS; i++) count[values[i] >> 8]++;
    int order[256];
    std::iota(order, order + 256, 0);
    std::stable_sort(order, order + 256, [&](int a, int b) { return count[a] > count[b]; });
    std::copy_n(order, 16, table);
}

// Where each high byte stands in a table; 16 where it does not.
class Places {
public:
    explicit Places(const uint8_t (&table)[16]) {
        std::fill_n(place_, 256, uint8_t(16));
        for (int i = 0; i < 16; i++) place_[table[i]] = uint8_t(i);
    }
    uint8_t of(uint16_t value) const { return place_[value >> 8]; }
    bool any_missing(const uint16_t* four) const {
        return std::any_of(four, four + FOURS, [&](uint16_t value) { return of(value) == 16; });
    }

private:
    uint8_t place_[256];
};

void encode(const uint16_t* values, long fours, Linear::Pair& pair, uint8_t* out) {
    const Places places(pair.table);
    for (long four = 0; four < fours; four++, values += FOURS, out += 192) {
        if (places.any_missing(values)) {
            std::copy_n(values, FOURS, pair.rare.emplace_back(four).values);
            continue;
        }
        for (long i = 0; i < FOURS; i++) {  // [2][k / 2][lane][k % 2]
            const long panel = i / 64, k = i / 32 % 2 * 2 + i % 2, lane = i / 2 % 16;
            const long at = lane / 4 * 16 + k / 2 * 8 + lane % 4 * 2 + k % 2;
            out[panel * 64 + at] = uint8_t(values[i]);
            out[128 + at] |= uint8_t(places.of(values[i]) << panel * 4);
        }
    }
}

}  // namespace
}  // namespace shoal

using namespace shoal;
#define EXPORT extern "C" __attribute__((visibility("default")))

// A zeroed matrix and bias, or null when there is no memory for it.
EXPORT Linear* shoal_linear_new(int dtype, long num_outputs, long num_inputs, int gate_up, int has_bias) try {
    auto linear = std::make_unique<Linear>(Dtype(dtype), num_outputs, num_inputs, gate_up != 0);
    linear->data = (linear->dtype == Dtype::bf16 ? staging : zeroed)(linear->data_bytes());
    if (has_bias) linear->bias.resize(linear->panels() * 16);
    return linear.release();
} catch (const std::bad_alloc&) {
    return nullptr;
}

// Copies `rows` rows of w to outputs first.. of the matrix; `part` 1 is the up half of a gate-up matrix.
EXPORT void shoal_linear_fill(Linear* to, int part, long first, long rows, const void* w, long stride, int threads) {
    const long from = first / 16, panels = (first + rows + 15) / 16 - from;
    parallel(threads, panels, [&](long i) {
        const long panel = from + i, begin = std::max(first, panel * 16), end = std::min(first + rows, panel * 16 + 16);
        const long row = (begin - first) * stride, target = to->gate_up ? panel * 2 + part : panel;
        if (to->dtype == Dtype::f32)
            pack_panel(*to, target, begin % 16, static_cast<const uint32_t*>(w) + row, stride, end - begin);
        else
            pack_panel(*to, target, begin % 16, static_cast<const uint16_t*>(w) + row, stride, end - begin);
    });
}

// Copies the bias of all outputs; `part` 1 is the up half of a gate-up matrix.
EXPORT void shoal_linear_fill_bias(Linear* to, int part, const float* bias) {
    for (long n = 0; n < to->num_outputs; n++) {
        const long panel = to->gate_up ? n / 16 * 2 + part : n / 16;
        to->bias[panel * 16 + n % 16] = bias[n];
    }
}

// To be called once all is filled: bfloat16 becomes bf12 where that pays. 0 when there is no memory for it.
EXPORT int shoal_linear_settle(Linear* w, int threads) try {
    if (w->dtype != Dtype::bf16) return 1;
    const auto plain = w->data;
    const long count = (w->panels() + 1) / 2, fours = w->fours();
    const auto* values = reinterpret_cast<const uint16_t*>(plain.get());
    std::vector<Linear::Pair> pairs(count);
    std::vector<long> rare(count);  // fours of each that will lie apart
    parallel(threads, count, [&](long i) {
        const auto* pair = values + i * fours * FOURS;
        choose_table(pair, fours, pairs[i].table);
        const Places places(pairs[i].table);
        for (long four = 0; four < fours; four++) rare[i] += places.any_missing(pair + four * FOURS);
    });
    // Of weights that nobody trained: what lies apart would cost more than is saved.
    if (std::accumulate(rare.begin(), rare.end(), 0L) * 16 > count * fours) {
        w->data = zeroed(w->data_bytes());
        std::memcpy(w->data.get(), plain.get(), w->data_bytes());
        return 1;
    }
    for (long i = 0; i < count; i++) pairs[i].rare.reserve(rare[i]);  // no thread of the pool may run out of memory
    w->dtype = Dtype::bf12;
    w->data = zeroed(w->data_bytes());
    w->pairs = std::move(pairs);
    parallel(threads, count, [&](long i) {
        auto* out = reinterpret_cast<uint8_t*>(w->data.get() + i * w->pair_bytes());
        encode(values + i * fours * FOURS, fours, w->pairs[i], out);
    });
    return 1;
} catch (const std::bad_alloc&) {
    return 0;
}

EXPORT long shoal_linear_num_bytes(const Linear* linear) { return linear->num_bytes(); }

EXPORT void shoal_linear_free(Linear* linear) { delete linear; }
