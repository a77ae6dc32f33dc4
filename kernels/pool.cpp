#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shoal {
namespace {

using Item = void (*)(const void*, long);

// The bits must not depend on who runs an item, so all run with IEEE defaults: a caller may have asked for denormals
// to be flushed, a worker inherits whatever its creator had.
class IeeeMode {
#if defined(__x86_64__)
public:
    IeeeMode() : before_(_mm_getcsr()) { if (differs()) _mm_setcsr(defaults); }
    ~IeeeMode() { if (differs()) _mm_setcsr(before_); }

private:
    static constexpr unsigned defaults = 0x1f80, flags = 0x3f;  // the flags only record what has happened
    bool differs() const { return (before_ & ~flags) != defaults; }
    const unsigned before_;
#else
public:
    IeeeMode() {}
#endif
};

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Long enough for Python to get from one kernel to the next, short enough not to hold a core that others want.
constexpr auto SPIN = std::chrono::microseconds(50);

template <class Ready> bool spin_until(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; i++) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// One call at a time; who finds it taken runs its items alone, which costs time and no bits.
//
// Items are claimed by counting `open_` down. The caller waits for claimed items only: a worker that has not woken,
// or that another process keeps from its core, is never waited for. A worker may come late and look at a call that is
// over; `open_` carries the call's number, so such a claim fails and what it read of the job is not used.
class Pool {
public:
    void run(int threads, long items, Item item, const void* context) {
        IeeeMode mode;
        if (threads <= 1 || items <= 1 || taken_.test_and_set(std::memory_order_acquire)) {
            for (long i = 0; i < items; i++) item(context, i);
            return;
        }
        grow(threads - 1);
        item_.store(item, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        items_.store(items, std::memory_order_relaxed);
        helpers_.store(threads - 1, std::memory_order_relaxed);
        unfinished_.store(items, std::memory_order_relaxed);
        call_++;
        open_.store(uint64_t(call_) << 32 | uint32_t(items), std::memory_order_release);
        bell_.fetch_add(1, std::memory_order_release);
        bell_.notify_all();
        help();
        auto done = [&] { return unfinished_.load(std::memory_order_acquire) == 0; };
        while (!spin_until(done)) std::this_thread::yield();
        taken_.clear(std::memory_order_release);
    }

private:
    void help() {
        uint64_t open = open_.load(std::memory_order_acquire);
        while (uint32_t(open) != 0) {
            const Item item = item_.load(std::memory_order_relaxed);
            const void* context = context_.load(std::memory_order_relaxed);
            const long i = items_.load(std::memory_order_relaxed) - uint32_t(open);
            if (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel)) continue;
            item(context, i);
            unfinished_.fetch_sub(1, std::memory_order_release);
            open = open_.load(std::memory_order_acquire);
        }
    }

    void work(int id) {
        IeeeMode mode;
        for (uint32_t heard = 0;;) {
            auto rung = [&] { return bell_.load(std::memory_order_acquire) != heard; };
            if (!spin_until(rung)) bell_.wait(heard, std::memory_order_acquire);
            heard = bell_.load(std::memory_order_acquire);
            if (id < helpers_.load(std::memory_order_relaxed)) help();
        }
    }

    void grow(int workers) {
        try {
            for (; workers_ < workers; workers_++) std::thread(&Pool::work, this, workers_).detach();
        } catch (const std::system_error&) {  // the machine allows no more threads: those we have will do
        }
    }

    std::atomic_flag taken_;
    int workers_ = 0;
    uint32_t call_ = 0;
    std::atomic<Item> item_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<long> items_{0};
    std::atomic<int> helpers_{0};
    alignas(64) std::atomic<uint64_t> open_{0};  // the call's number, and how many of its items nobody has claimed
    alignas(64) std::atomic<long> unfinished_{0};
    alignas(64) std::atomic<uint32_t> bell_{0};
};

Pool pool;

// A forked child has none of the workers, and its parent may have been in the middle of a call.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { new (&pool) Pool; });

}  // namespace

void run_items(int threads, long items, Item item, const void* context) { pool.run(threads, items, item, context); }

}  // namespace shoal
