"""Checkpoints of small random models, written without Megatron, whose layers are dense or have a window."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.model.rope_scaling import RECORD
from s2_megatron.tools.hf.import_hf import write_checkpoint
from s2_megatron.tools.hf.torch_dist import TorchDistWriter
from s2_megatron.tools.hf.weights import Shape, pieces

LAYERS, HEADS, KV_HEADS, WORDS = 4, 4, 2, 128


def shape_of(**more) -> Shape:
    sizes = dict(
        num_layers=LAYERS, hidden_size=64, ffn_hidden_size=96, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=16,
        vocab_size=WORDS, padded_vocab_size=WORDS, qkv_bias=False, qk_norm=False, tied=False,
    )  # fmt: skip
    return Shape(**sizes | more)


def plan_of(layers: str, heads: tuple[int, int] = (HEADS, KV_HEADS), **spec) -> ResolvedSparsity:
    """The sparsity of LAYERS layers. heads: query and KV heads. spec: of each layer W."""
    specs = dict(specs=dict(W=spec)) if spec else {}
    config = SparsityConfig.from_data(dict(block_size=16, layers=layers) | specs)
    return config.resolve(num_layers=LAYERS, num_heads=heads[0], num_kv_heads=heads[1], seq_length=1024)


def arguments_of(shape: Shape, **more) -> Namespace:
    """Those of Megatron that a checkpoint of the model has, as far as they are read."""
    args = dict(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads, group_query_attention=True, num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim, padded_vocab_size=shape.padded_vocab_size, add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm, untie_embeddings_and_output_weights=not shape.tied, softmax_type=shape.softmax_type,
        rotary_base=10000, use_rope_scaling=False, layernorm_epsilon=1e-5, init_method_std=0.02,
        max_position_embeddings=2048, seq_length=1024, tokenizer_type="NullTokenizer",
    )  # fmt: skip
    if more.get("use_rope_scaling"):
        args[RECORD] = 8.0
    return Namespace(**args | more)


def write(folder: Path, shape: Shape, **more) -> Path:
    """The checkpoint. more: arguments of Megatron."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for piece in pieces(shape):
        for name, size in piece.hf:
            values = torch.randn(size, generator=generator)
            weights[name] = 0.2 * values if len(size) > 1 or name.endswith("bias") else 1 + 0.1 * values
    (folder / "release").mkdir(parents=True)
    writer = TorchDistWriter(folder / "release")
    write_checkpoint(writer, SimpleNamespace(read=lambda name: weights[name]), shape)
    args = arguments_of(shape, **more)
    writer.add_object("common_state/shard_0_1", [{"args": args, "checkpoint_version": 3.0, "iteration": 0}])
    writer.finish()
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def written_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
