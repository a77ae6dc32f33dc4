"""What tells whether bytes are those that were saved."""

import numpy as np
import xxhash


def checksum(data: np.ndarray) -> int:
    """xxh3-64 of contiguous bytes; 6 GB/s here, beside other threads."""
    return xxhash.xxh3_64_intdigest(data.data)
