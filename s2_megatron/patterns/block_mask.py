"""Arbitrary block masks: compressed sparse rows of key blocks, for 1 head (shared by all), the KV heads or the query
heads. NumPy only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from s2_megatron.patterns.ranges import Pattern, pairs_from_counts


@dataclass(frozen=True, eq=False)
class BlockMaskPattern(Pattern):
    """A pattern given as lists of key blocks.

    tables: one (indptr int64[num_blocks + 1], indices int32[nonzeros]) per pattern head; row q of a table is the
    ascending list of the key blocks that query block q attends. Their number P is 1, num_kv_heads or num_heads. Memory
    is O(nonzeros).
    """

    block_size: int
    num_heads: int
    num_kv_heads: int
    num_blocks: int
    tables: tuple[tuple[np.ndarray, np.ndarray], ...]

    def __post_init__(self):
        self._check_heads()
        if len(self.tables) not in (1, self.num_kv_heads, self.num_heads):
            raise ValueError(
                f"block mask for {len(self.tables)} heads; expected 1, num_kv_heads={self.num_kv_heads} or num_heads={self.num_heads}"
            )

    @classmethod
    def from_csr(cls, block_size: int, num_heads: int, num_kv_heads: int, indptr, indices) -> BlockMaskPattern:
        """indptr, indices: one array per pattern head. Raises ValueError on an empty row, unsorted or repeated key
        blocks, k > q."""
        tables = []
        for head, (starts, keys) in enumerate(zip(indptr, indices, strict=True)):
            starts, keys = np.asarray(starts), np.asarray(keys)
            for name, array in (("indptr", starts), ("indices", keys)):
                if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
                    raise ValueError(
                        f"block mask head {head}: {name} has dtype {array.dtype} and {array.ndim} dimensions; expected integers, 1-D"
                    )
            starts = starts.astype(np.int64)
            if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(keys) or (np.diff(starts) < 0).any():
                raise ValueError(f"block mask head {head}: indptr must grow from 0 to len(indices)={len(keys)}")
            counts = np.diff(starts)
            if (counts == 0).any():
                raise ValueError(
                    f"block mask head {head}: query block {int(np.argmin(counts))} attends nothing; every row needs a key block, "
                    "e.g. its own (the diagonal)"
                )
            rows = np.repeat(np.arange(len(counts)), counts)
            bad = np.flatnonzero((keys < 0) | (keys > rows))
            if len(bad):
                raise ValueError(
                    f"block mask head {head}: query block {rows[bad[0]]} lists key block {int(keys[bad[0]])}; expected 0 to "
                    f"{rows[bad[0]]} (causal)"
                )
            unsorted = np.flatnonzero((np.diff(keys.astype(np.int64)) <= 0) & (np.diff(rows) == 0))
            if len(unsorted):
                raise ValueError(
                    f"block mask head {head}: the key blocks of query block {rows[unsorted[0]]} are not strictly ascending; sort them"
                )
            tables.append((starts, keys.astype(np.int32)))
        lengths = {len(starts) - 1 for starts, _ in tables}
        if len(lengths) != 1:
            raise ValueError(
                f"block mask heads have {sorted(lengths)} query blocks; expected the same number in every head"
            )
        return cls(block_size, num_heads, num_kv_heads, lengths.pop(), tuple(tables))

    @classmethod
    def from_function(
        cls, block_size: int, num_heads: int, num_kv_heads: int, num_blocks: int, function
    ) -> BlockMaskPattern:
        """function(head, query_block, key_blocks int64[q + 1]) -> bool[q + 1], called row by row for every query
        head."""
        indptr, indices = [], []
        for head in range(num_heads):
            rows = []
            for query in range(num_blocks):
                keys = np.arange(query + 1)
                chosen = np.asarray(function(head, query, keys))
                if chosen.shape != keys.shape or chosen.dtype != bool:
                    raise ValueError(
                        f"pattern function returned {chosen.dtype}{list(chosen.shape)} for head {head}, query block {query}; "
                        f"expected bool[{query + 1}], one per key block"
                    )
                rows.append(keys[chosen].astype(np.int32))
            indptr.append(np.concatenate([[0], np.cumsum([len(row) for row in rows])]))
            indices.append(np.concatenate(rows))
        return cls.from_csr(block_size, num_heads, num_kv_heads, indptr, indices)

    def table_of(self, head: int) -> int:
        """Index into `tables` of a query head."""
        return head * len(self.tables) // self.num_heads

    def key_blocks(self, head: int, query_block: int) -> np.ndarray:
        indptr, indices = self.tables[self.table_of(head)]
        return indices[indptr[query_block] : indptr[query_block + 1]].astype(np.int64)

    def check_length(self, seq_length: int) -> int:
        n_blocks = -(-seq_length // self.block_size)
        if n_blocks > self.num_blocks:
            raise ValueError(
                f"seq_length={seq_length} has {n_blocks} blocks of {self.block_size}, the block mask only {self.num_blocks}; "
                "use a shorter sequence or a larger mask"
            )
        return n_blocks

    def attended_pairs(self, seq_length: int) -> int:
        n_blocks = self.check_length(seq_length)
        per_table = []
        for indptr, indices in self.tables:
            counts = np.diff(indptr[: n_blocks + 1])
            diagonal = indices[indptr[1 : n_blocks + 1] - 1] == np.arange(n_blocks)
            per_table.append(pairs_from_counts(counts, diagonal, self.block_size, seq_length))
        return sum(per_table) * self.num_heads // len(self.tables)

    def tensor_parallel_slice(self, rank: int, size: int) -> BlockMaskPattern:
        heads, kv_heads = self.head_slice(rank, size)
        chosen = self.tables
        if len(chosen) == self.num_heads and self.num_heads > 1:
            chosen = chosen[heads.start : heads.stop]
        elif len(chosen) == self.num_kv_heads:
            chosen = chosen[kv_heads.start : kv_heads.stop]
        return BlockMaskPattern(self.block_size, len(heads), len(kv_heads), self.num_blocks, chosen)

    def canonical(self) -> dict:
        digests = []
        for indptr, indices in self.tables:
            digests.append(hashlib.sha256(indptr.astype("<i8").tobytes() + indices.astype("<i4").tobytes()).hexdigest())
        return {
            "kind": "block_mask",
            "block_size": self.block_size,
            "kv_heads": self.num_kv_heads,
            "heads": self.num_heads,
            "sha256": [digests[self.table_of(head)] for head in range(self.num_heads)],
        }

    def describe(self) -> str:
        return f"block mask {self.num_blocks} x {self.num_blocks}, {len(self.tables)} pattern heads"
