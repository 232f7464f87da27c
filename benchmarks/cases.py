"""What is measured: one attention call's shape and pattern, the same pattern at a peer's block size, and pair counts.

S sequence, B batch, H query heads, G KV heads, D head dim, T packed tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from s2_megatron.config.load import load_config
from s2_megatron.ops.call import canonical_view
from s2_megatron.ops.layout import PackedSequence
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern, make_range_pattern


@dataclass(frozen=True)
class Case:
    """One attention call. `length` is the tokens of a sequence; packed documents (thd) have `documents`, their lengths,
    and no batch."""

    name: str
    pattern: Pattern
    length: int
    batch: int = 1
    head_dim: int = 128
    dtype: str = "bfloat16"
    tensor_format: str = "sbhd"
    documents: tuple[int, ...] | None = None

    def __post_init__(self):
        if (self.tensor_format == "thd") != (self.documents is not None):
            raise ValueError(
                f"case {self.name}: tensor_format={self.tensor_format} with documents={self.documents}; "
                "thd needs documents, the others none"
            )

    @property
    def heads(self) -> int:
        return self.pattern.num_heads

    @property
    def kv_heads(self) -> int:
        return self.pattern.num_kv_heads

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every sequence or document."""
        return self.documents or (self.length,) * self.batch

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def pairs(self, pattern: Pattern) -> int:
        """Attended (query, key) pairs of the whole call under a pattern, over all query heads."""
        return sum(pattern.attended_pairs(length) for length in self.lengths)

    @property
    def dense_pairs(self) -> int:
        return self.heads * sum(length * (length + 1) // 2 for length in self.lengths)

    @property
    def bytes_of_lse(self) -> int:
        return 4 * self.heads * self.tokens

    def memory_limit(self) -> int:
        """Bytes beyond q, k, v, out, LSE and gradients that our kernels may take: an fp32 dQ, an fp32 per query row and
        head, 16 MiB."""
        return 4 * self.heads * self.tokens * self.head_dim + self.bytes_of_lse + 2**24


class Tensors:
    """Random query, key, value (which want gradients) and the gradient of out, on a device, in a case's format; copies
    in others."""

    def __init__(self, case: Case, device: str = "cuda", seed: int = 0):
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, device=device, dtype=case.torch_dtype, generator=generator)

        heads = [case.heads, case.kv_heads, case.kv_heads]
        if case.tensor_format == "bhsd":
            parts = [random(case.batch, count, case.length, case.head_dim) for count in heads]
        else:  # as Megatron gives them: strided views of one fused projection
            rows = {"sbhd": (case.length, case.batch), "bshd": (case.batch, case.length), "thd": (case.tokens,)}[
                case.tensor_format
            ]
            parts = list(random(*rows, sum(heads), case.head_dim).split(heads, dim=len(rows)))
        self.inputs = tuple(part.requires_grad_() for part in parts)
        self.grad = random(*parts[0].shape)
        self.packed = None
        if case.documents is not None:
            edges = np.concatenate([[0], np.cumsum(case.documents)])
            self.packed = PackedSequence(torch.tensor(edges, dtype=torch.int32, device=device), max(case.documents))
        self._copies = {case.tensor_format: (self.inputs, self.grad)}

    def contiguous(self, tensor_format: str):
        """((query, key, value), grad) contiguous in bhsd, bshd or thd: each peer gets what suits it best."""
        key = f"contiguous {tensor_format}"
        if key not in self._copies:
            order = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}
            views = [canonical_view(tensor.detach(), self.case.tensor_format) for tensor in (*self.inputs, self.grad)]
            if tensor_format == "thd":
                views = [view[0].transpose(0, 1).contiguous() for view in views]
            else:
                views = [view.permute(order[tensor_format]).contiguous() for view in views]
            self._copies[key] = tuple(view.requires_grad_() for view in views[:3]), views[3]
        return self._copies[key]


def coarsen(pattern: Pattern, block_size: int, length: int) -> Pattern:
    """The pattern of the same window and stride in tokens, in blocks of `block_size`; the pattern itself when it has
    such blocks or larger.

    Where ends or strides are no multiples of the larger block, and for block masks: every large block that holds an
    attended one.
    """
    factor = block_size // pattern.block_size
    if factor <= 1:
        return pattern
    if isinstance(pattern, RangePattern) and all(
        (end is None or end % factor == 0) and (stride == 1 or stride % factor == 0)
        for head in pattern.heads
        for end, stride in head.ranges
    ):
        heads = {head: _coarse_head(head, factor) for head in set(pattern.heads)}
        return RangePattern(block_size, pattern.num_kv_heads, tuple(heads[head] for head in pattern.heads))
    fine_rows = -(-length // pattern.block_size)
    coarse_rows = -(-fine_rows // factor)
    tables: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    chosen = []
    for head in range(pattern.num_heads):
        same = pattern.heads[head] if isinstance(pattern, RangePattern) else pattern.table_of(head)
        if same not in tables:
            rows = []
            for row in range(coarse_rows):
                inside = range(row * factor, min((row + 1) * factor, fine_rows))
                rows.append(np.unique(np.concatenate([pattern.key_blocks(head, query) for query in inside]) // factor))
            tables[same] = np.concatenate([[0], np.cumsum([len(row) for row in rows])]), np.concatenate(rows)
        chosen.append(tables[same])
    return BlockMaskPattern.from_csr(block_size, pattern.num_heads, pattern.num_kv_heads, *zip(*chosen))


def _coarse_head(head: HeadPattern, factor: int) -> HeadPattern:
    period = math.lcm(*(stride for _, stride in head.ranges))
    # Block k = -offset (mod stride) is the first stripe of the head; the large block that holds it is attended.
    first = (-head.offset) % period // factor
    ranges = tuple((None if end is None else end // factor, max(1, stride // factor)) for end, stride in head.ranges)
    return HeadPattern(ranges, -first)


def equal_pairs(pattern: Pattern, block_size: int) -> Pattern:
    """The pattern with the same window in tokens and the same strides in blocks, in larger blocks: about as many pairs,
    stripes further apart. Raises ValueError for block masks and for windows that the larger blocks cannot express."""
    factor = max(1, block_size // pattern.block_size)
    if not isinstance(pattern, RangePattern) or any(
        end is not None and end % factor for head in pattern.heads for end, _ in head.ranges
    ):
        raise ValueError(f"the pattern has no twin of equal pairs at blocks of {block_size}")
    heads = {
        head: HeadPattern(
            tuple((None if end is None else end // factor, stride) for end, stride in head.ranges), head.offset
        )
        for head in set(pattern.heads)
    }
    return RangePattern(factor * pattern.block_size, pattern.num_kv_heads, tuple(heads[head] for head in pattern.heads))


def block_lists(pattern: Pattern, length: int):
    """(counts int32 [H, n], key blocks int32 [H, n, most]) below the diagonal, rows ascending and padded with 0, for
    peers that read lists.

    The diagonal block, which is masked by token, is not among them. Raises ValueError for a mask whose query blocks do
    not all attend it.
    """
    n_blocks = -(-length // pattern.block_size)
    found: dict[object, list[np.ndarray]] = {}
    rows_of = []
    for head in range(pattern.num_heads):
        same = pattern.heads[head] if isinstance(pattern, RangePattern) else pattern.table_of(head)
        if same not in found:
            rows = [pattern.key_blocks(head, query) for query in range(n_blocks)]
            if any(row[-1] != query for query, row in enumerate(rows)):
                raise ValueError("a query block does not attend its own block")
            found[same] = [row[:-1] for row in rows]
        rows_of.append(same)
    most = max(1, max(len(row) for rows in found.values() for row in rows))
    padded = {}
    for same, rows in found.items():
        table = np.zeros((n_blocks, most), dtype=np.int32)
        for query, row in enumerate(rows):
            table[query, : len(row)] = row
        padded[same] = np.array([len(row) for row in rows], dtype=np.int32), table
    return np.stack([padded[same][0] for same in rows_of]), np.stack([padded[same][1] for same in rows_of])


def as_table(pattern: RangePattern, length: int) -> BlockMaskPattern:
    """The same blocks as an arbitrary block mask, a table for each KV head (or query head, where heads of a group
    differ)."""
    ratio = pattern.num_heads // pattern.num_kv_heads
    grouped = all(pattern.heads[head] == pattern.heads[head // ratio * ratio] for head in range(pattern.num_heads))
    heads = pattern.heads[::ratio] if grouped else pattern.heads
    n_blocks = -(-length // pattern.block_size)
    tables = {}
    for head in set(heads):
        rows = [head.key_blocks(query) for query in range(n_blocks)]
        tables[head] = np.concatenate([[0], np.cumsum([len(row) for row in rows])]), np.concatenate(rows)
    return BlockMaskPattern.from_csr(
        pattern.block_size, pattern.num_heads, pattern.num_kv_heads, *zip(*(tables[head] for head in heads))
    )


def lognormal_documents(count: int, mean: int, sigma: float = 1.0, seed: int = 0) -> tuple[int, ...]:
    """`count` document lengths with log-normal spread, count * mean tokens in all, at least 16 each; the same for the
    same seed."""
    weights = np.random.default_rng(seed).lognormal(0.0, sigma, count)
    lengths = np.maximum(16, np.floor(weights / weights.sum() * count * mean)).astype(int)
    lengths[np.argmax(lengths)] += count * mean - lengths.sum()
    return tuple(int(length) for length in lengths)


def parse_ranges(text: str, block_size: int):
    """'1024:1,8192:4,:16' -> ((16, 1), (128, 4), (None, 16)) for blocks of 64: token ends with the stride up to them,
    the last without end."""
    ranges = []
    for part in text.split(","):
        end, _, stride = part.partition(":")
        if not stride.isdigit() or (end and not end.isdigit()):
            raise ValueError(f"--ranges {text}: {part!r} is not END_TOKENS:STRIDE, e.g. 1024:1,8192:4,:16")
        if end and int(end) % block_size:
            raise ValueError(
                f"--ranges {text}: {end} tokens is no multiple of --block-size {block_size}; "
                f"nearest: {max(1, round(int(end) / block_size)) * block_size}"
            )
        ranges.append((int(end) // block_size if end else None, int(stride)))
    return tuple(ranges)


def pattern_from_flags(args, length: int) -> Pattern:
    """The pattern that --config, or the flags, ask for. Raises ValueError naming the flag."""
    if args.config:
        config = load_config(args.config, allow_python_patterns=args.allow_python_patterns)
        plan = len(config.settings.layers)
        layers = args.num_layers or -(-(args.layer + 1) // plan) * plan
        if not 0 <= args.layer < layers:
            raise ValueError(
                f"--layer {args.layer}: the model has {layers} layers, counted from 0; use 0 to {layers - 1}"
            )
        sparsity = config.resolve(
            num_layers=layers, num_heads=args.num_heads, num_kv_heads=args.num_kv_heads, seq_length=length
        )
        layer = sparsity.layers[args.layer]
        if layer.pattern is None:
            sparse = [index for index, other in enumerate(sparsity.layers) if other.pattern is not None]
            raise ValueError(f"--layer {args.layer} of {args.config} is dense; its S2 layers are {sparse[:8]}")
        pattern = layer.pattern
    else:
        if args.ranges:
            ranges = parse_ranges(args.ranges, args.block_size)
        else:
            if args.local_tokens % args.block_size or args.local_tokens < args.block_size:
                raise ValueError(
                    f"--local-tokens {args.local_tokens}: expected a multiple of --block-size {args.block_size}"
                )
            ranges = ((args.local_tokens // args.block_size, 1), *(((None, args.stride),) if args.stride else ()))
        pattern = make_range_pattern(
            block_size=args.block_size,
            num_heads=args.num_heads,
            num_kv_heads=args.num_kv_heads,
            ranges=ranges,
            slide=args.slide,
            head_step=args.head_step,
            base_offset=args.base_offset,
            dense_heads={"spread": args.dense_heads},
        )
    if args.as_table and isinstance(pattern, RangePattern):
        pattern = as_table(pattern, length)
    return pattern
