// The pools that keys and values of one layer lie in, and where a step's rows stand in them. Mirrored by ctypes in
// library.py.
#pragma once
#include <vector>

namespace shoal {

struct Pool {  // [blocks, block_rows, heads, head_size], a block's [block_rows, heads, head_size] contiguous
    void *k, *v;
    long k_stride, v_stride;  // elements from one block to the next
    long blocks;
    int block_rows, heads, head_size, is_bf16;
};

// A layer that sees a window only, and the step's own rows beside it: they go to the ring when all have attended.
struct Ring {
    Pool slots;      // a block is a slot; the row of position p is its row p % block_rows
    Pool segments;   // a block is a segment, which holds the last rows of a block; none of a layer that is not stored
    void *k, *v;     // [own_rows, heads, head_size] in the slots' type: row t of a step is row t
    long own_rows;
};

struct Piece {  // the segment of the block of `sequence` that ends at `boundary`
    int sequence, boundary, segment;
};

struct Rows {
    const int *sequence, *position;  // [count]
    const int* table;                // [sequences, width]
    const int* store_from;           // [sequences]: earlier rows are in their blocks already; null: all are written
    // [sequences]: state slot, first position of the step, and first position of which layers that are not stored have
    // rows; null where no layer has a ring. Each sequence's rows are then neighbours, in order of their positions.
    const int *slot, *start, *valid_from;
    const Piece *restores, *captures;
    long count, sequences, width, num_restores, num_captures;

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

    bool fit(const Ring& ring) const { return count <= ring.own_rows && fit_slots(ring.slots.blocks); }

    // Whether the rows are as state needs them, and every slot exists.
    bool fit_slots(long slots) const {
        if (!slot) return false;
        for (long s = 0; s < sequences; s++) {
            if (slot[s] < 0 || slot[s] >= slots) return false;
            if (valid_from[s] < 0 || valid_from[s] > start[s]) return false;
        }
        for (long t = 0; t < count; t++) {
            const long s = sequence[t];
            if (s < 0 || s >= sequences) return false;
            const bool first = t == 0 || sequence[t - 1] != s;
            if (position[t] != (first ? start[s] : position[t - 1] + 1)) return false;
        }
        return true;
    }
};

struct Run {  // rows of one sequence in a step
    long first = 0, rows = 0;
};

inline std::vector<Run> runs_of(const Rows& rows) {
    std::vector<Run> runs(rows.sequences);
    for (long t = 0; t < rows.count; t++) {
        Run& run = runs[rows.sequence[t]];
        if (t == 0 || rows.sequence[t - 1] != rows.sequence[t]) run = {t, 0};
        run.rows++;
    }
    return runs;
}

}  // namespace shoal
