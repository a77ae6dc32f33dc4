// A step's operations, one after the other, in one call: Python is asked for nothing between them, and the pool's
// workers find each before they tire of looking.
#include "ops.h"

struct Call {  // mirrored by ctypes in library.py
    shoal::Kernel kernel;
    const void* op;
};

extern "C" __attribute__((visibility("default"))) int shoal_run_tape(const Call* calls, long count,
                                                                      const shoal::Rows* rows, int threads) {
    for (long i = 0; i < count; i++)
        if (const int failed = calls[i].kernel(calls[i].op, rows, threads)) return failed;
    return 0;
}
