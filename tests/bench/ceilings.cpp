// What a machine can do at best: memory read and fused multiply-adds done, in a second, by some threads together.
// Compiled for the machine it runs on, by tests.bench.kernels.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float V __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

// Calls f(thread) on all threads at once, and returns the seconds until the last is done.
template <class F> double together(int threads, const F& f) {
    std::atomic<int> ready{0};
    std::vector<std::thread> others;
    auto meet = [&] {
        for (ready++; ready < threads;) {}
    };
    for (int i = 1; i < threads; i++) others.emplace_back([&, i] { meet(), f(i); });
    meet();
    const auto start = std::chrono::steady_clock::now();
    f(0);
    for (auto& other : others) other.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Memory on huge pages where it can be had.
class Memory {
public:
    explicit Memory(long bytes) : bytes_(bytes) {
        void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) return;
        at_ = static_cast<char*>(mapped);
#if defined(MADV_HUGEPAGE)
        madvise(at_, bytes, MADV_HUGEPAGE);
#endif
        std::memset(at_, 0, bytes);
    }
    ~Memory() {
        if (at_) munmap(at_, bytes_);
    }
    Memory(const Memory&) = delete;
    const char* at() const { return at_; }

private:
    const long bytes_;
    char* at_ = nullptr;
};

volatile float sink;

void read(const char* from, const char* end, long ahead) {
    V sums[4] = {};
    for (; from < end; from += 4 * sizeof(V)) {
        for (int i = 0; i < 4; i++) sums[i] += *reinterpret_cast<const Unaligned*>(from + i * sizeof(V));
        for (long i = 0; ahead && i < long(4 * sizeof(V)); i += 64) __builtin_prefetch(from + ahead + i);
    }
    sink = (sums[0] + sums[1] + sums[2] + sums[3])[0];
}

void multiply_add(long times) {
    V sums[12], x = V{} + 0.9999f, y = V{} + 0.5f;
    for (int i = 0; i < 12; i++) sums[i] = V{} + float(i);
    for (long i = 0; i < times; i++)
#pragma GCC unroll 12
        for (auto& sum : sums) sum = sum * x + y;
    for (int i = 1; i < 12; i++) sums[0] += sums[i];
    sink = sums[0][0];
}

}  // namespace

// Bytes a second, each thread from memory of its own, the best of some ways to ask for it; 0: no memory.
extern "C" double read_speed(int threads, long bytes_a_thread) {
    const Memory memory(threads * bytes_a_thread);
    if (!memory.at()) return 0;
    double best = 0;
    for (const long ahead : {0, 1024, 4096, 8192}) {
        const double seconds = together(threads, [&](int i) {
            const char* from = memory.at() + i * bytes_a_thread;
            read(from, from + bytes_a_thread, ahead);
        });
        best = std::max(best, threads * bytes_a_thread / seconds);
    }
    return best;
}

// Floating point operations a second; a fused multiply-add is two.
extern "C" double fma_speed(int threads) {
    constexpr long times = 1 << 21;
    return threads * times * 12 * LANES * 2.0 / together(threads, [](int) { multiply_add(times); });
}
