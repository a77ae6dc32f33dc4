// Several linears at once, for kernels that need many small ones.
#pragma once
#include <span>

#include "ops.h"

namespace shoal::SHOAL_ISA {

struct Multiply {
    LinearOp op;
    long rows;
};

// Who computes what is chance: none may read what another writes.
void multiply_all(std::span<const Multiply> all, int threads);

}  // namespace shoal::SHOAL_ISA
