"""Arbitrary block masks: compressed sparse rows of key blocks, for 1 head (shared by all), the KV heads or the query
heads. NumPy only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from s2_megatron.patterns.checks import MOST_TOKENS, check_integer, check_integers, check_sequence, check_shape, shown
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.patterns.tokens import pairs_of_terms

MOST_BLOCKS = 2**24  # query blocks of a mask


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
        shape = check_shape(self.block_size, self.num_heads, self.num_kv_heads)
        for name, value in zip(("block_size", "num_heads", "num_kv_heads"), shape):
            object.__setattr__(self, name, value)
        fix = "use from_csr or from_function, which count them"
        object.__setattr__(self, "num_blocks", check_integer("num_blocks", self.num_blocks, 1, MOST_BLOCKS, fix))
        tables = check_sequence("tables", self.tables, "one (indptr, indices) per pattern head", fix)
        object.__setattr__(self, "tables", tables)
        if len(tables) not in (1, self.num_kv_heads, self.num_heads):
            raise ValueError(
                f"block mask for {len(tables)} heads; expected 1, num_kv_heads={self.num_kv_heads} or "
                f"num_heads={self.num_heads}; give as many tables"
            )
        for head, table in enumerate(tables):
            arrays = isinstance(table, tuple) and len(table) == 2 and all(isinstance(a, np.ndarray) for a in table)
            if not arrays or len(table[0]) != self.num_blocks + 1:
                raise ValueError(
                    f"tables[{head}]={shown(table)}; expected (indptr, indices) for {self.num_blocks} query blocks; "
                    f"{fix}"
                )

    @classmethod
    def from_csr(cls, block_size: int, num_heads: int, num_kv_heads: int, indptr, indices) -> BlockMaskPattern:
        """indptr int [num_blocks + 1], indices int [nonzeros]: a list of each, with one array per pattern head.

        Raises ValueError for arrays that do not stand in lists, another dtype, an empty row, unsorted or repeated key
        blocks, and key blocks that do not exist or lie behind the query block.
        """
        lists = []
        for name, arrays in (("indptr", indptr), ("indices", indices)):
            if isinstance(arrays, np.ndarray) and arrays.ndim == 2:
                arrays = list(arrays)
            expected, fix = "a list with one array per pattern head", f"use [{name}] for one pattern of all heads"
            lists.append(check_sequence(name, arrays, expected, fix))
        if len(lists[0]) != len(lists[1]):
            raise ValueError(
                f"indptr has {len(lists[0])} arrays and indices {len(lists[1])}; expected one of each per pattern head"
            )
        tables = []
        for head, (starts, keys) in enumerate(zip(*lists)):
            starts = check_integers(f"indptr[{head}]", starts, 1, "indptr holds one such array per pattern head")
            keys = check_integers(f"indices[{head}]", keys, 1, "indices holds one such array per pattern head")
            starts = starts.astype(np.int64)
            if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(keys) or (np.diff(starts) < 0).any():
                raise ValueError(
                    f"indptr[{head}]={shown(starts.tolist())}; expected two numbers or more that grow from 0 to "
                    f"len(indices[{head}])={len(keys)}; count the key blocks of each row"
                )
            counts = np.diff(starts)
            if (counts == 0).any():
                raise ValueError(
                    f"block mask head {head}: query block {int(np.argmin(counts))} attends nothing; every row needs a "
                    "key block, e.g. its own (the diagonal)"
                )
            rows = np.repeat(np.arange(len(counts)), counts)
            bad = np.flatnonzero((keys < 0) | (keys > rows))
            if len(bad):
                raise ValueError(
                    f"block mask head {head}: query block {rows[bad[0]]} lists key block {int(keys[bad[0]])}; expected "
                    f"0 to {rows[bad[0]]} (causal); remove it"
                )
            unsorted = np.flatnonzero((np.diff(keys.astype(np.int64)) <= 0) & (np.diff(rows) == 0))
            if len(unsorted):
                raise ValueError(
                    f"block mask head {head}: the key blocks of query block {rows[unsorted[0]]} are not strictly "
                    "ascending; sort them"
                )
            tables.append((starts, keys.astype(np.int32)))
        lengths = {len(starts) - 1 for starts, _ in tables}
        if not lengths:
            raise ValueError("indptr=[]; expected one array per pattern head; give at least one")
        if len(lengths) != 1:
            raise ValueError(
                f"block mask heads have {sorted(lengths)} query blocks; expected the same number in every head; make "
                "them for one length"
            )
        return cls(block_size, num_heads, num_kv_heads, lengths.pop(), tuple(tables))

    @classmethod
    def from_function(
        cls, block_size: int, num_heads: int, num_kv_heads: int, num_blocks: int, function
    ) -> BlockMaskPattern:
        """function(head, query_block, key_blocks int64[q + 1]) -> bool[q + 1], called row by row for every query
        head. Raises ValueError for another result, and as from_csr."""
        block_size, num_heads, num_kv_heads = check_shape(block_size, num_heads, num_kv_heads)
        num_blocks = check_integer("num_blocks", num_blocks, 1, MOST_BLOCKS, "use the blocks of the longest sequence")
        if not callable(function):
            raise ValueError(
                f"function={shown(function)}; expected a function of (head, query_block, key_blocks) that returns "
                "bool[query_block + 1]; give one"
            )
        indptr, indices = [], []
        for head in range(num_heads):
            rows = []
            for query in range(num_blocks):
                keys = np.arange(query + 1)
                chosen = np.asarray(function(head, query, keys))
                if chosen.shape != keys.shape or chosen.dtype != bool:
                    raise ValueError(
                        f"pattern function returned {chosen.dtype}{list(chosen.shape)} for head {head}, query block "
                        f"{query}; expected bool[{query + 1}], one per key block"
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
        """Query blocks of a sequence of seq_length tokens. Raises ValueError when the mask has fewer."""
        seq_length = check_integer("seq_length", seq_length, 1, MOST_TOKENS, "use the number of tokens")
        n_blocks = -(-seq_length // self.block_size)
        if n_blocks > self.num_blocks:
            raise ValueError(
                f"seq_length={seq_length} has {n_blocks} blocks of {self.block_size}, the block mask only "
                f"{self.num_blocks}; use a shorter sequence or a larger mask"
            )
        return n_blocks

    def row_terms(self, n_blocks: int) -> list[tuple[np.ndarray, np.ndarray]]:
        self.check_length(n_blocks * self.block_size)
        below, diagonal = np.zeros(n_blocks, dtype=np.int64), np.zeros(n_blocks, dtype=np.int64)
        heads_per_table = self.num_heads // len(self.tables)
        for indptr, indices in self.tables:
            own = indices[indptr[1 : n_blocks + 1] - 1] == np.arange(n_blocks)
            below += heads_per_table * (np.diff(indptr[: n_blocks + 1]) - own)
            diagonal += heads_per_table * own
        row = np.arange(self.block_size, dtype=np.int64)
        return [(below, np.full_like(row, self.block_size)), (diagonal, row + 1)]

    def nonzeros(self, n_blocks: int) -> int:
        self.check_length(n_blocks * self.block_size)
        return self.num_heads // len(self.tables) * sum(int(indptr[n_blocks]) for indptr, _ in self.tables)

    def attended_pairs(self, seq_length: int) -> int:
        return pairs_of_terms(self.row_terms(self.check_length(seq_length)), seq_length)

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
