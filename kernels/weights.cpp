// Weight memory, and packing into it. The layout is the same for every instruction set.
#include "weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>

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

// Sixteen rows of w at a time, read in order and written to their lanes.
template <class T> void pack_panel(Linear& to, long panel, int lane0, const T* w, long stride, long rows) {
    T* out = reinterpret_cast<T*>(to.data.get()) + to.panel_offset(panel);
    for (long r = 0; r < rows; r++) {
        const T* row = w + r * stride;
        const long lane = lane0 + r;
        for (long k = 0; k < to.num_inputs; k++) {
            const long in_four = to.dtype == Dtype::bf16 ? k % 4 / 2 * 32 + lane * 2 + k % 2 : k % 4 * 16 + lane;
            out[k / 4 * 128 + in_four] = row[k];
        }
    }
}

}  // namespace
}  // namespace shoal

using namespace shoal;
#define EXPORT extern "C" __attribute__((visibility("default")))

// A zeroed matrix and bias, or null when there is no memory for it.
EXPORT Linear* shoal_linear_new(int dtype, long num_outputs, long num_inputs, int gate_up, int has_bias) try {
    auto linear = std::make_unique<Linear>(Linear{Dtype(dtype), num_outputs, num_inputs, gate_up != 0, nullptr, {}});
    if (has_bias) linear->bias.resize(linear->panels() * 16);
    linear->data = zeroed(linear->num_bytes());
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
        if (to->element_size() == 4)
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

EXPORT long shoal_linear_num_bytes(const Linear* linear) { return linear->num_bytes(); }

EXPORT void shoal_linear_free(Linear* linear) { delete linear; }
