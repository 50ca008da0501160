"""Memory of KV pools that the CPU addresses.

Owns how such memory is allocated. A pool is an array of bytes, one row for each block, so that a
block is one run. It begins at a huge page and numpy asks the kernel for huge pages: blocks picked
at random then cost few misses of the address cache, and copies between two such pools reach what
one large memcpy reaches, where ordinary pages give four fifths of it and a start at a random
address much less still.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ByteRows = NDArray[np.uint8]
"""A pool as bytes: [num_blocks, bytes of a block]."""

_HUGE_PAGE_BYTES = 2 << 20


def allocate_rows(num_rows: int, row_bytes: int) -> ByteRows:
    """[num_rows, row_bytes], of any content; pages take memory when they are first written.

    Raises MemoryError when the address space is not there.
    """
    size = num_rows * row_bytes
    try:
        memory = np.empty(size + _HUGE_PAGE_BYTES, dtype=np.uint8)
    except (ValueError, OverflowError) as error:  # more than numpy can count
        raise MemoryError(str(error)) from error
    start = -memory.ctypes.data % _HUGE_PAGE_BYTES
    return memory[start : start + size].reshape(num_rows, row_bytes)
