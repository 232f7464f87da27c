"""A pattern as a text that is complete, and back: what a compiled or exported program carries of a layout.

    {"format": 1, "kind": "ranges", "block_size": 64, "kv_heads": 1,
     "rules": [[[[16, 1], [null, 16]], null, 0]], "heads": [[0, 3]]}

rules: the distinct ranges with their window and sink in tokens; heads: which of them a query head has, and its offset.
A block mask has its tables packed.
"""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np

from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.checks import shown
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern

FORMAT = 1


def text_of(pattern: Pattern) -> str:
    """Equal for two patterns iff their fields are equal. A range pattern takes about 10 bytes a head, a block mask what
    its key blocks take when they are compressed."""
    content = {"format": FORMAT, "block_size": pattern.block_size, "kv_heads": pattern.num_kv_heads}
    if isinstance(pattern, BlockMaskPattern):
        content |= {"kind": "block_mask", "heads": pattern.num_heads}
        content["tables"] = [packed_table(*table) for table in pattern.tables]
    else:
        known: dict = {}
        rules = [(head.ranges, head.window, head.sink_tokens) for head in pattern.heads]
        heads = [[known.setdefault(rule, len(known)), head.offset] for rule, head in zip(rules, pattern.heads)]
        content |= {"kind": "ranges", "rules": list(known), "heads": heads}
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def pattern_of(text: str) -> Pattern:
    """The pattern that text_of was given. Raises ValueError for any other text."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {shown(content['format'])}")
        if content["kind"] == "block_mask":
            tables = [unpacked_table(table) for table in content["tables"]]
            shape = content["block_size"], content["heads"], content["kv_heads"]
            return BlockMaskPattern.from_csr(*shape, *zip(*tables))
        if content["kind"] != "ranges":
            raise ValueError(f"kind {shown(content['kind'])}")
        size = content["block_size"]
        heads = []
        for index, offset in content["heads"]:
            ranges, window, sink = content["rules"][index]
            by_token = window is not None or sink
            heads.append(HeadPattern(tuple(map(tuple, ranges)), offset, window, sink, size if by_token else None))
        return RangePattern(size, content["kv_heads"], tuple(heads))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"the stored layout {shown(text)} cannot be read ({type(error).__name__}: {error}); expected the text of a "
            f"pattern of format {FORMAT}; export the program again with this release"
        ) from error


def packed_table(indptr: np.ndarray, indices: np.ndarray) -> dict:
    """Row lengths, and the key blocks as differences, which compress well."""
    return {
        "counts": _packed(np.diff(indptr).astype("<i4")),
        "differences": _packed(np.diff(indices, prepend=0).astype("<i4")),
    }


def unpacked_table(table: dict) -> tuple[np.ndarray, np.ndarray]:
    """(indptr, indices) of packed_table. Raises ValueError for a text that cannot be unpacked."""
    counts, differences = (_unpacked(table[name]) for name in ("counts", "differences"))
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), np.cumsum(differences, dtype=np.int32)


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode("ascii")


def _unpacked(text: str) -> np.ndarray:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype="<i4")
    except (ValueError, zlib.error) as error:
        raise ValueError(f"a stored block mask cannot be unpacked ({error}); export the model again") from error
