"""Small random models, and the patterns that the tests of this folder go through."""

from pathlib import Path

import numpy as np
import torch

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.config.stored import stored_sparsity
from s2_megatron.huggingface import S2GPTConfig, S2GPTForCausalLM
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern

BLOCK = 16
HEADS, KV_HEADS, VOCABULARY = 4, 2, 97
MASK_BLOCKS = 40

SPECS = {
    "s2": dict(local_blocks=2, stride=4),
    "dense_heads": dict(local_blocks=2, stride=4, dense_heads=(1,)),
    "query_slide": dict(local_blocks=2, stride=4, slide="query", head_step="paper", base_offset=1, layer_step=0),
    "window": dict(local_blocks=2),
    "tokens": dict(window=37, sink_tokens=3),
    "tokens_by_head": dict(window=[21, 5], stride=4, sink_tokens=20),
    "tokens_query_slide": dict(window=50, stride=2, slide="query", head_step=1),
    "sink_beside_blocks": dict(local_blocks=2, sink_tokens=17),
    "three_ranges": dict(
        ranges=[dict(end_blocks=2, stride=1), dict(end_blocks=8, stride=2), dict(stride=4)]
    ),
    "not_efficient": dict(
        ranges=[dict(end_blocks=2, stride=1), dict(end_blocks=8, stride=3), dict(end_blocks=12, stride=2)]
    ),
}  # fmt: skip


def random_mask(pattern_heads: int, seed: int = 0) -> BlockMaskPattern:
    """A block mask with gaps: a block may be dropped and wanted again."""
    generator = np.random.default_rng(seed)
    indptr, indices = [], []
    for _ in range(pattern_heads):
        rows = []
        for query in range(MASK_BLOCKS):
            chosen = generator.random(query + 1) < 0.2
            chosen[query] = query % 3 != 2  # now and then not even its own block
            if not chosen.any():
                chosen[generator.integers(query + 1)] = True
            rows.append(np.flatnonzero(chosen))
        indptr.append(np.cumsum([0, *map(len, rows)]))
        indices.append(np.concatenate(rows))
    return BlockMaskPattern.from_csr(BLOCK, HEADS, KV_HEADS, indptr, indices)


def mixed_windows() -> RangePattern:
    """Every query head with ranges of its own."""
    forms = (((3, 1),), ((1, 1), (None, 2)), ((None, 1),), ((2, 1), (6, 2), (None, 4)))
    return RangePattern(BLOCK, KV_HEADS, tuple(HeadPattern(form, index) for index, form in enumerate(forms)))


def sparsity_named(name: str) -> ResolvedSparsity:
    """A dense layer, then one with the pattern. Names: SPECS, mask_1, mask_kv, mask_heads, mixed, dense."""
    if name in SPECS:
        return plan_of(name, "DS")
    patterns = {
        "mask_1": lambda: random_mask(1),
        "mask_kv": lambda: random_mask(KV_HEADS),
        "mask_heads": lambda: random_mask(HEADS),
        "mixed": mixed_windows,
        "dense": lambda: None,
    }
    layers = (LayerSparsity("D", None), LayerSparsity("S", patterns[name]()))
    return ResolvedSparsity(layers, (), None, BLOCK, HEADS, KV_HEADS, 256)


def plan_of(name: str, layers: str) -> ResolvedSparsity:
    """Layers "DSS" with a spec of SPECS; the patterns of the S differ in their residues."""
    config = SparsityConfig.from_data(dict(block_size=BLOCK, layers=layers, specs=dict(S=SPECS[name])))
    return config.resolve(num_layers=len(layers), num_heads=HEADS, num_kv_heads=KV_HEADS, seq_length=256)


NAMES = (*SPECS, "mask_1", "mask_kv", "mask_heads", "mixed", "dense")


def config_of(sparsity: ResolvedSparsity, **more) -> S2GPTConfig:
    settings = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=len(sparsity.layers),
        num_attention_heads=sparsity.num_heads, num_key_value_heads=sparsity.num_kv_heads, head_dim=16,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return S2GPTConfig(**settings | more, s2_sparsity=stored_sparsity(sparsity))


def model_of(sparsity: ResolvedSparsity, seed: int = 0, **more) -> S2GPTForCausalLM:
    torch.manual_seed(seed)
    return S2GPTForCausalLM(config_of(sparsity, **more)).eval()


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


SHIPPED = {
    path.stem: path for path in sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
}  # fmt: skip
