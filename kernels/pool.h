// One thread pool for all kernels.
#pragma once

namespace shoal {

// Calls item(context, i) for every i in [0, items), on the caller and at most `threads - 1` workers, and returns when
// all are done. Who runs an item is chance, so items must not depend on one another's results.
void run_items(int threads, long items, void (*item)(const void*, long), const void* context);

template <class F> void parallel(int threads, long items, const F& f) {
    run_items(threads, items, [](const void* context, long i) { (*static_cast<const F*>(context))(i); }, &f);
}

// Rows in items of about `work` elements: small calls stay on the caller's thread.
template <class F> void parallel_rows(int threads, long rows, long row_size, const F& f) {
    constexpr long work = 1 << 14;
    const long per_item = row_size < work ? work / row_size : 1, items = (rows + per_item - 1) / per_item;
    parallel(threads, items, [&](long i) {
        const long end = (i + 1) * per_item < rows ? (i + 1) * per_item : rows;
        for (long t = i * per_item; t < end; t++) f(t);
    });
}

}  // namespace shoal
