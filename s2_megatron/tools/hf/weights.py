"""Which tensors of a Hugging Face model make up which tensors of Megatron's, and how.

Megatron stacks layers, keeps query, key and value of a KV group together ([G, R + 2, D] rows) and the gate of the MLP
before its other half. L layers, H query heads, G KV heads, R = H / G, D head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.experts."
# The norm before experts, by the names that Megatron's local layers and Transformer Engine's give it in a checkpoint.
BEFORE_EXPERTS = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


@dataclass(frozen=True)
class Experts:
    """The experts of a model whose router is a softmax. layers: which layers have them. hidden: of each expert.
    normalized: whether the weights of the `top` chosen experts of a token sum to 1, or are their shares among all."""

    layers: tuple[bool, ...]
    count: int
    hidden: int
    top: int
    normalized: bool


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama- or Qwen-shaped model. padded_vocab_size: the rows of Megatron's embedding, of which
    vocab_size are words. experts: None where every layer has a dense MLP."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    softmax_type: str = "vanilla"  # Megatron's: learnable has one number a head in each layer
    experts: Experts | None = None
    mixtral: bool = False  # whether the Hugging Face names of experts are Mixtral's, and not Qwen3-MoE's

    @property
    def stacked(self) -> bool:
        """Whether Megatron stores all layers as one tensor: they are equal."""
        return self.experts is None or all(self.experts.layers)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def group_rows(self) -> int:
        """Rows of the fused projection that belong to one KV group."""
        return (self.num_heads // self.num_kv_heads + 2) * self.head_dim


class Piece(NamedTuple):
    """Rows of one of Megatron's tensors in one layer, and the Hugging Face tensors that they are.

    layer: None for tensors outside of layers. first, rows: in the tensor's first dimension. hf: (name, shape) of each
    tensor. split takes the rows apart into them, join puts them together. expert: whose rows they are, in a tensor with
    those of all experts of a layer, which its first dimension counts.
    """

    name: str
    layer: int | None
    first: int
    shape: tuple[int, ...]
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    join: Callable[[list[torch.Tensor]], torch.Tensor]
    expert: int | None = None


def _same(
    name: str, layer: int | None, shape: tuple[int, ...], hf: str, first: int = 0, expert: int | None = None
) -> Piece:
    return Piece(name, layer, first, shape, ((hf, shape),), lambda rows: [rows], lambda parts: parts[0], expert)


def _qkv(shape: Shape, layer: int, what: str) -> Piece:
    ratio, groups, dim = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads, shape.head_dim
    columns = (shape.hidden_size,) if what == "weight" else ()

    def split(rows):
        grouped = rows.view(groups, ratio + 2, dim, *columns)
        return [
            grouped[:, first:end].reshape(-1, *columns)
            for first, end in ((0, ratio), (ratio, ratio + 1), (ratio + 1, None))
        ]

    def join(parts):
        return torch.cat([part.view(groups, -1, dim, *columns) for part in parts], 1).view(-1, *columns)

    heads = ((("q", shape.num_heads)), ("k", groups), ("v", groups))
    hf = tuple((f"model.layers.{layer}.self_attn.{name}_proj.{what}", (n * dim, *columns)) for name, n in heads)
    return Piece(
        f"self_attention.linear_qkv.{what}", layer, 0, (groups * shape.group_rows, *columns), hf, split, join
    )  # fmt: skip


def _mlp(shape: Shape, layer: int) -> Iterator[Piece]:
    """The MLP of a layer, or its experts, which Mixtral and Qwen3-MoE name unlike."""
    hf, hidden, ffn = f"model.layers.{layer}", shape.hidden_size, shape.ffn_hidden_size
    if not shape.has_experts(layer):
        yield _same("mlp.linear_fc1.weight", layer, (ffn, hidden), f"{hf}.mlp.gate_proj.weight")
        yield _same("mlp.linear_fc1.weight", layer, (ffn, hidden), f"{hf}.mlp.up_proj.weight", first=ffn)
        yield _same("mlp.linear_fc2.weight", layer, (hidden, ffn), f"{hf}.mlp.down_proj.weight")
        return
    experts, ffn = shape.experts, shape.experts.hidden
    block, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2") if shape.mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    yield _same("mlp.router.weight", layer, (experts.count, hidden), f"{hf}.{block}.gate.weight")
    for expert in range(experts.count):
        own = f"{hf}.{block}.experts.{expert}"
        first, second = f"{EXPERTS}linear_fc1.weight", f"{EXPERTS}linear_fc2.weight"
        yield _same(first, layer, (ffn, hidden), f"{own}.{gate}.weight", expert=expert)
        yield _same(first, layer, (ffn, hidden), f"{own}.{up}.weight", first=ffn, expert=expert)
        yield _same(second, layer, (hidden, ffn), f"{own}.{down}.weight", expert=expert)


def pieces(shape: Shape) -> Iterator[Piece]:
    """All of a model's weights, in the order of the layers."""
    hidden, words = shape.hidden_size, shape.vocab_size
    yield _same("embedding.word_embeddings.weight", None, (words, hidden), "model.embed_tokens.weight")
    for layer in range(shape.num_layers):
        hf = f"model.layers.{layer}"
        yield _same("self_attention.linear_qkv.layer_norm_weight", layer, (hidden,), f"{hf}.input_layernorm.weight")
        yield _qkv(shape, layer, "weight")
        if shape.qkv_bias:
            yield _qkv(shape, layer, "bias")
        if shape.qk_norm:
            for name in "qk":
                yield _same(
                    f"self_attention.{name}_layernorm.weight",
                    layer,
                    (shape.head_dim,),
                    f"{hf}.self_attn.{name}_norm.weight",
                )
        if shape.softmax_type == "learnable":
            own = "self_attention.core_attention.softmax_offset"
            yield _same(own, layer, (shape.num_heads,), f"{hf}.self_attn.sinks")
        width = shape.num_heads * shape.head_dim
        yield _same("self_attention.linear_proj.weight", layer, (hidden, width), f"{hf}.self_attn.o_proj.weight")
        yield _same("mlp.linear_fc1.layer_norm_weight", layer, (hidden,), f"{hf}.post_attention_layernorm.weight")
        yield from _mlp(shape, layer)
    yield _same("decoder.final_layernorm.weight", None, (hidden,), "model.norm.weight")
    if not shape.tied:
        yield _same("output_layer.weight", None, (words, hidden), "lm_head.weight")


def stored_name(name: str) -> str:
    """The norm before experts by the name of Megatron's local layers. Other names stay as they are."""
    local, engine = BEFORE_EXPERTS
    return re.sub(rf"(^decoder\.layers\.(\d+\.)?){re.escape(engine)}$", rf"\1{local}", name)


def name_in_gpt(name: str) -> str:
    """What a tensor of a HybridModel of `*-` and `*E` is called in a checkpoint of the GPT that computes the same,
    whose layers are not stacked; names that no such model has stay as they are."""
    name = stored_name(name)
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found is None:
        return name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    layer, half = divmod(int(found[1]), 2)
    rest = name[found.end() :]
    return f"{LAYERS}{layer}.{rest}" if rest.startswith(("self_attention.", "mlp.")[half]) else name


def megatron_shapes(shape: Shape, *, stacked: bool = True) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a checkpoint, by Megatron's name. stacked: whether the layers, which are equal then,
    are one tensor, or each has names of its own."""
    result: dict[str, tuple[int, ...]] = {}
    for piece in pieces(shape):
        size = piece.shape
        if piece.name in ("mlp.linear_fc1.weight", f"{EXPERTS}linear_fc1.weight"):
            size = (2 * size[0], *size[1:])
        if piece.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            size = (shape.padded_vocab_size, *size[1:])
        if piece.expert is not None:
            size = (shape.experts.count, *size)
        if piece.layer is None:
            result[piece.name] = size
        elif stacked:
            result[LAYERS + piece.name] = (shape.num_layers, *size)
        else:
            result[f"{LAYERS}{piece.layer}.{piece.name}"] = size
    return result
