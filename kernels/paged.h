// The paged key/value pool of one layer, and where a step's rows stand in it. Mirrored by ctypes in library.py.
#pragma once

namespace shoal {

struct Pool {  // [blocks, block_rows, heads, head_size], a block's [block_rows, heads, head_size] contiguous
    void *k, *v;
    long k_stride, v_stride;  // elements from one block to the next
    long blocks;
    int block_rows, heads, head_size, is_bf16;
};

struct Rows {
    const int *sequence, *position;  // [count]
    const int* table;                // [sequences, width]
    long count, sequences, width;

    long block(long s, long i) const { return table[s * width + i]; }

    // Whether every row's sequence, position and blocks exist.
    bool fit(const Pool& pool) const {
        long last_sequence = -1, checked = 0;  // blocks of it known to exist
        for (long t = 0; t < count; t++) {
            const long s = sequence[t], blocks = position[t] / pool.block_rows + 1;
            if (s < 0 || s >= sequences || position[t] < 0 || blocks > width) return false;
            if (s != last_sequence) last_sequence = s, checked = 0;
            for (; checked < blocks; checked++)
                if (block(s, checked) < 0 || block(s, checked) >= pool.blocks) return false;
        }
        return true;
    }
};

}  // namespace shoal
