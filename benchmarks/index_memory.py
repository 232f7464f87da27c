"""Prints the index data that kernels read for a pattern: O(heads) bytes for ranges of distance, O(nonzeros) for block
masks. Needs no GPU.

    python benchmarks/index_memory.py

Sample of its output:

    range pattern, 32 heads, any length (1048576 tokens: 16384 blocks)       1.0 KB
"""

from __future__ import annotations

import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import make_range_pattern

LIMIT = 16 * 2**20
BLOCK, HEADS = 64, 32


def main():
    tokens = 2**20
    pattern = make_range_pattern(block_size=BLOCK, num_heads=HEADS, num_kv_heads=HEADS, ranges=((16, 1), (None, 16)))
    held = build_layout(pattern).index_bytes
    print(
        f"range pattern, {HEADS} heads, any length ({tokens} tokens: {tokens // BLOCK} blocks)   {held / 1024:8.1f} KB"
    )
    if held > LIMIT:
        raise SystemExit(f"{held} bytes of index data; expected at most {LIMIT}")
    for tokens in (32768, 131072):
        n_blocks = tokens // BLOCK
        rows = [pattern.heads[0].key_blocks(query) for query in range(n_blocks)]
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        mask = BlockMaskPattern.from_csr(BLOCK, HEADS, HEADS, [indptr], [np.concatenate(rows)])
        held = build_layout(mask).index_bytes
        print(
            f"the same blocks of one head as a block mask, {tokens} tokens, {indptr[-1]} nonzeros   "
            f"{held / 1024:8.1f} KB, {held / indptr[-1]:.1f} bytes a nonzero; "
            f"an [H, N, N] mask would be {HEADS * n_blocks**2 / 1024:.0f} KB"
        )


if __name__ == "__main__":
    main()
