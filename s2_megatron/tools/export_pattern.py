"""s2-megatron export-pattern: which blocks every head of every layer attends, for other engines, and how to check a
port.

    s2-megatron export-pattern configs/s2_7b_mixed.yaml --num-layers 32 --num-attention-heads 32 --output pattern
    s2-megatron export-pattern --model 7b-hf --output pattern

The folder has pattern.json (ranges and offsets of every head), masks.npz (block masks, where there are any),
vectors_<pattern>.npz (query, key, value, out, LSE and the softmax scale, fp32, of each different pattern) and
flex_mask.py (FlexAttention's mask_mod of it all).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.config.load import load_config
from s2_megatron.config.sparsity import ResolvedSparsity, dense_pairs
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.tools import flex_mask
from s2_megatron.tools.hf.folders import complete_folder
from s2_megatron.tools.inputs import read_json_object

RULE = (
    "Blocks have block_size tokens and count from the start of the text. Query block q attends key block k <= q iff, "
    "with d = q - k, a range [previous end, end) of its head holds d (an end of null has no limit) and "
    "(k + offset) mod stride == 0. Beside them each query attends the newest window tokens, itself included (null: "
    "none), and the first sink_tokens of the text. No token sees what comes after itself. Block masks: "
    "compressed sparse rows; the rows of several tables stand one after the other in indices, and every row of indptr "
    "counts from 0."
)
LONGEST_VECTORS = 4096  # tokens with all their queries
LONGEST_KEYS, LAST_QUERIES = 16384, 256  # of a pattern that needs more to be told from dense


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", help="the sparsity YAML; or --model")
    parser.add_argument("--model", type=Path, help="a folder that export-hf wrote, instead of the YAML and the numbers")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--num-query-groups", type=int, help="KV heads (default: as many as attention heads)")
    parser.add_argument("--seq-length", type=int, help="how long block masks are needed (default: 8192)")
    parser.add_argument("--s2-allow-python-patterns", action="store_true", help="import the functions of the YAML")
    parser.add_argument("--head-dim", type=int, default=16, help="of the test vectors (default: 16)")
    parser.add_argument("--output", type=Path, required=True, help="the folder to make; it must not exist")


def run(args: argparse.Namespace) -> int:
    sparsity = _sparsity(args)
    if not 1 <= args.head_dim <= 256:
        raise ValueError(f"--head-dim {args.head_dim}: expected 1 to 256, e.g. 16")
    with complete_folder(args.output, "--output") as work:
        write_pattern(sparsity, work, args.head_dim)
    print(f"wrote {args.output}: {len(sparsity.layers)} layers, {sparsity.num_heads} heads")
    return 0


def _sparsity(args: argparse.Namespace) -> ResolvedSparsity:
    if (args.config is None) == (args.model is None):
        raise ValueError("expected either a sparsity YAML or --model FOLDER; give one of them")
    if args.model is not None:
        from s2_megatron.config.stored import sparsity_from_stored

        numbers = ("num_layers", "num_attention_heads", "num_query_groups", "seq_length")
        if given := [f"--{name.replace('_', '-')}" for name in numbers if getattr(args, name) is not None]:
            raise ValueError(f"{given[0]} beside --model, whose config says it; expected one of them; leave it out")
        where, expected = f"--model {printable(args.model, 200)}", "a folder of export-hf"
        stored = read_json_object(args.model / "config.json", where, expected).get("s2_sparsity")
        if stored is None:
            raise ValueError(f"{where}: its config has no s2_sparsity; expected {expected}; name one")
        return sparsity_from_stored(stored)
    if args.num_layers is None or args.num_attention_heads is None:
        raise ValueError("a sparsity YAML needs --num-layers and --num-attention-heads: offsets depend on both")
    return load_config(args.config, allow_python_patterns=args.s2_allow_python_patterns).resolve(
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_attention_heads if args.num_query_groups is None else args.num_query_groups,
        seq_length=8192 if args.seq_length is None else args.seq_length,
    )


def write_pattern(sparsity: ResolvedSparsity, folder: Path, head_dim: int) -> None:
    """pattern.json, masks.npz, vectors_<pattern>.npz and flex_mask.py."""
    patterns = list(dict.fromkeys(layer.pattern for layer in sparsity.layers))
    masks: dict[str, np.ndarray] = {}
    content = {
        "format": 1,
        "rule": RULE,
        "block_size": sparsity.block_size,
        "num_heads": sparsity.num_heads,
        "num_kv_heads": sparsity.num_kv_heads,
        "softmax_scale": sparsity.softmax_scale,  # null: head dim ** -0.5
        "layers": [patterns.index(layer.pattern) for layer in sparsity.layers],
        "patterns": [_form(pattern, index, masks) for index, pattern in enumerate(patterns)],
    }
    (folder / "pattern.json").write_text(json.dumps(content, indent=1) + "\n")
    if masks:
        np.savez_compressed(folder / "masks.npz", **masks)
    for index, pattern in enumerate(patterns):
        vectors = check_vectors(pattern, sparsity, head_dim, seed=index)
        np.savez(folder / f"vectors_{index}.npz", **vectors)
        length = vectors["key"].shape[2]
        if pattern is not None and pattern.attended_pairs(length) == dense_pairs(sparsity.num_heads, length):
            line = f"note: vectors_{index}.npz has {length:,} tokens, in which the pattern is dense: they do not find a"
            print(f"{line} port that is", file=sys.stderr)
    shutil.copy(flex_mask.__file__, folder / "flex_mask.py")


def _form(pattern: Pattern | None, index: int, masks: dict[str, np.ndarray]) -> dict:
    if pattern is None:
        return {"kind": "dense"}
    if isinstance(pattern, RangePattern):
        names = ("ranges", "offset", "window", "sink_tokens")  # tokens; a window of null is none
        heads = [dict(zip(names, head.canonical)) for head in pattern.heads]
        return {"kind": "ranges", "kv_efficient": pattern.is_kv_efficient, "heads": heads}
    assert isinstance(pattern, BlockMaskPattern)
    masks[f"pattern{index}_indptr"] = np.stack([indptr for indptr, _ in pattern.tables])
    masks[f"pattern{index}_indices"] = np.concatenate([indices for _, indices in pattern.tables])
    return {"kind": "block_mask", "table_of_head": [pattern.table_of(head) for head in range(pattern.num_heads)]}


def _vector_tokens(pattern: Pattern) -> int:
    """Enough tokens to show every range and every offset, and not a whole number of blocks."""
    blocks, longest = 4, LONGEST_KEYS
    if isinstance(pattern, RangePattern):
        ends = [end or 0 for head in pattern.heads for end, _ in head.touched_ranges]
        strides = [stride for head in pattern.heads for _, stride in head.touched_ranges]
        blocks = max(ends) + 2 * max(strides) + 2 + max(head.sink_blocks for head in pattern.heads)
    elif isinstance(pattern, BlockMaskPattern):
        blocks, longest = pattern.num_blocks, LONGEST_VECTORS
    return min(blocks * pattern.block_size, longest) - pattern.block_size // 2 - 1


def check_vectors(pattern: Pattern | None, sparsity: ResolvedSparsity, head_dim: int, seed: int) -> dict:
    """query [1, H, Q, D], key and value [1, G, S, D], out [1, H, Q, D], lse [1, H, Q] (natural log), softmax_scale [];
    fp32, computed in fp64 from the fp32 inputs. The queries are those of the last Q tokens: of all S, or of
    LAST_QUERIES where S is above LONGEST_VECTORS."""
    import torch

    from s2_megatron.ops.api import s2_attention
    from s2_megatron.ops.checks import softmax_scale_of
    from s2_megatron.ops.layout import build_layout

    if pattern is None:
        pattern = RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
    length = _vector_tokens(pattern)
    generator = torch.Generator().manual_seed(seed)
    heads = (sparsity.num_heads, sparsity.num_kv_heads, sparsity.num_kv_heads)
    tensors = [torch.randn(1, count, length, head_dim, generator=generator) for count in heads]
    if length > LONGEST_VECTORS:
        tensors[0] = tensors[0][:, :, -LAST_QUERIES:].clone()
    scale = softmax_scale_of(sparsity.softmax_scale, head_dim)
    settings = dict(softmax_scale=scale, tensor_format="bhsd", backend="reference", return_lse=True)
    out, lse = s2_attention(*(tensor.double() for tensor in tensors), build_layout(pattern), **settings)
    named = dict(zip(("query", "key", "value", "out", "lse"), (*tensors, out.float(), lse.float())))
    return {name: tensor.numpy() for name, tensor in named.items()} | {"softmax_scale": np.float32(scale)}
