"""How many bytes a token, a block and a pool take, and in which order they lie."""

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["float32", "bfloat16"]

_DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The paged pool is [blocks, layers, 2 (K, V), block_size, num_kv_heads, head_dim].

    The block comes first, so its bytes over all layers are one contiguous range: saving a block is one copy.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVDtype = "float32"

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)
