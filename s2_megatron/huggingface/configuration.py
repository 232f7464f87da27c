"""The configuration of an S2-Attention model in transformers: a Llama- or Qwen-shaped decoder, and every layer's
sparsity."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.config.stored import MODEL_TYPE, SOFTMAX_TYPES
from s2_megatron.huggingface.layer_plans import other_shape, resolved_sparsity


@strict
class S2GPTConfig(LlamaConfig):
    """A decoder with RoPE, RMSNorm, SwiGLU and grouped-query attention, and the sparsity of its layers.

    All fields of LlamaConfig keep their meaning. qkv_bias: biases of the query, key and value projections (Qwen2).
    qk_norm: an RMSNorm over the head dim of every query and key head, before RoPE (Qwen3). softmax_type: Megatron's:
    vanilla, off-by-one, or learnable (a weight `sinks` in each layer, as gpt-oss has). s2_sparsity: what
    `s2_megatron.config.stored.stored_sparsity` returns; it is complete, nothing else is read.

    num_experts: of every layer but mlp_only_layers; None: all layers have a dense MLP. With num_experts_per_tok,
    moe_intermediate_size and norm_topk_prob (true is Mixtral's routing, too) they are those of Qwen3-MoE.

    Raises ValueError when the sparsity was made for another number of layers or heads, and for experts of which a
    number is missing.
    """

    model_type = MODEL_TYPE

    qkv_bias: bool = False
    qk_norm: bool = False
    softmax_type: str = "vanilla"
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    mlp_only_layers: list[int] | None = None
    s2_sparsity: dict | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.softmax_type not in SOFTMAX_TYPES:
            raise ValueError(
                f"softmax_type={self.softmax_type!r}; expected one of {', '.join(SOFTMAX_TYPES)}; use vanilla for a "
                "softmax over the keys alone"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every KV head needs the same number of query heads"
            )
        chosen, width = self.num_experts_per_tok or 0, self.moe_intermediate_size or 0
        if self.num_experts is not None and not (0 < chosen <= self.num_experts and width > 0):
            raise ValueError(
                f"num_experts={self.num_experts}, num_experts_per_tok={self.num_experts_per_tok}, "
                f"moe_intermediate_size={self.moe_intermediate_size}; expected three numbers above 0, at most "
                "num_experts for each token; give all three, or none for a model without experts"
            )
        if self.s2_sparsity is not None:  # transformers also builds a config without arguments, to compare with
            sparsity = self.sparsity
            stored = (len(sparsity.layers), sparsity.num_heads, sparsity.num_kv_heads)
            wanted = (self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads)
            if stored != wanted:
                raise other_shape(stored, wanted)

    def validate_architecture(self):
        """Nothing: Llama wants a hidden_size that is a multiple of the heads, which a head_dim of its own makes
        needless."""

    def has_experts(self, layer: int) -> bool:
        return self.num_experts is not None and layer not in (self.mlp_only_layers or [])

    @property
    def sparsity(self) -> ResolvedSparsity:
        """The pattern of every layer. Equal configs share the objects."""
        return resolved_sparsity(self)
