"""The model: transformers' Llama with S2-Attention in it, Qwen's biases, norms and experts where the config has them.

The weights have Llama's names (q_norm and k_norm are Qwen3's, experts are Qwen3-MoE's). B batch, T tokens, D head dim.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from s2_megatron.huggingface.attention import NAME, check_arguments, read_texts, rotated
from s2_megatron.huggingface.cache import CACHE_ARGUMENT, S2Cache
from s2_megatron.huggingface.configuration import S2GPTConfig

TEXTS = "s2_texts"  # among the layers' keyword arguments: what read_texts returned


def cache_of(arguments: dict) -> Cache | None:
    """The cache among a module's keyword arguments. Raises ValueError for one under a name that the model does not
    read: it would go on as if there were no text before."""
    caches = {name: value for name, value in arguments.items() if isinstance(value, Cache)}
    cache = caches.pop(CACHE_ARGUMENT, None)
    for name, ignored in caches.items():
        raise ValueError(
            f"{name}={type(ignored).__name__} for a model of type s2_gpt: transformers {transformers.__version__} "
            f"calls the cache {CACHE_ARGUMENT} and would ignore it; pass it as {CACHE_ARGUMENT}="
        )
    return cache


class S2GPTRMSNorm(nn.RMSNorm):
    """Llama's norm in one kernel: decoding is bound by launches otherwise."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps=eps)


class S2GPTAttention(LlamaAttention):
    """Llama's attention module with Qwen's options, around the attention function `s2`."""

    def __init__(self, config: S2GPTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.qkv_bias:
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
                setattr(self, name, nn.Linear(config.hidden_size, count * self.head_dim, bias=True))
        if config.qk_norm:
            self.q_norm = S2GPTRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = S2GPTRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        if config.softmax_type == "learnable":
            self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        """hidden_states [B, T, hidden]; returns ([B, T, hidden], None)."""
        cache = cache_of(kwargs)
        texts = kwargs.pop(TEXTS, None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        compact = cache if isinstance(cache, S2Cache) else None
        rotary = position_embeddings if compact is not None and query.shape[1] == 1 else None
        if rotary is None:  # else the cache does it, in the kernel of its decoding step
            # Under autocast the projections are in 16 bits, and what RoPE multiplies is not.
            query, key = (tensor.to(value.dtype) for tensor in rotated(query, key, position_embeddings))
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if cache is not None and compact is None:
            key, value = cache.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        if texts is None:  # without S2GPTModel around it
            more = _without_caches(kwargs)
        else:
            attention_mask, more = texts, {}
        offset = None
        if self.config.softmax_type != "vanilla":
            learned = self.config.softmax_type == "learnable"
            offset = self.sinks if learned else query.new_zeros(query.shape[1])
        out, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            compact_cache=compact,
            rotary=rotary,
            s_aux=offset,
            **more,
        )
        return self.o_proj(out.flatten(-2)), weights


class S2GPTDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: S2GPTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = S2GPTAttention(config, layer_idx)
        if config.has_experts(layer_idx):
            self.mlp = Qwen3MoeSparseMoeBlock(config)
        self.input_layernorm = S2GPTRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = S2GPTRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class S2GPTPreTrainedModel(LlamaPreTrainedModel):
    config_class = S2GPTConfig
    config: S2GPTConfig
    _no_split_modules = ["S2GPTDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False
    _can_record_outputs = {"hidden_states": S2GPTDecoderLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module) -> None:
        super()._init_weights(module)
        if getattr(module, "sinks", None) is not None:
            init.normal_(module.sinks, std=self.config.initializer_range)
        if isinstance(module, Qwen3MoeExperts | Qwen3MoeTopKRouter):
            for weight in module.parameters(recurse=False):
                init.normal_(weight, std=self.config.initializer_range)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs) -> str:
        """ "s2", which is also the default. Any other implementation would attend what the model was not trained
        with."""
        if attn_implementation not in (None, NAME):
            raise ValueError(
                f"attn_implementation={attn_implementation!r} for a model of type {self.config.model_type}: it was "
                f"trained with the sparsity in its config, which only attn_implementation='{NAME}' computes; leave the "
                "argument out"
            )
        return NAME

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # asked by set_attn_implementation, before the check above refuses all but one

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the decorator of its experts in this file


class S2GPTModel(S2GPTPreTrainedModel, LlamaModel):
    def __init__(self, config: S2GPTConfig):
        LlamaPreTrainedModel.__init__(self, config)  # not LlamaModel's, which would build layers of its own
        _ = config.sparsity  # refuses a config without sparsity, before any weight is made
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([S2GPTDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = S2GPTRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        """Llama's forward. attention_mask [B, N] of all tokens so far, padding on the left (on the right in training);
        packed texts by position_ids [B, T] that begin again, by cu_seq_lens_q and _k or seq_idx, without a cache.
        Raises ValueError for other masks, for packed texts with a cache, and for output_attentions or
        output_router_logits."""
        if kwargs.get("output_router_logits"):
            raise ValueError(
                "output_router_logits=True: a model of type s2_gpt does not return them, nor a loss of its router; "
                "expected False; leave it out"
            )
        check_arguments(_without_caches(kwargs), self.config)
        given = next((tokens for tokens in (input_ids, kwargs.get("inputs_embeds")) if tokens is not None), None)
        if given is not None:  # else Llama's own error follows
            kwargs[TEXTS] = read_texts(self.config, given, attention_mask, position_ids, kwargs)
            if kwargs[TEXTS].packed is not None:
                kwargs["use_cache"] = False
        return super().forward(input_ids=input_ids, attention_mask=None, position_ids=position_ids, **kwargs)


def _without_caches(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if not isinstance(value, Cache)}


class S2GPTForCausalLM(S2GPTPreTrainedModel, LlamaForCausalLM):
    """Generation takes an S2Cache unless it is given another one (cache_implementation="dynamic": the full cache)."""

    def __init__(self, config: S2GPTConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.model = S2GPTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic", "dynamic_full", "offloaded", "quantized"):
            raise ValueError(
                f"cache_implementation={wanted!r} for a model of type {self.config.model_type}: a static cache returns "
                "keys that do not exist yet; expected none (then S2Cache) or 'dynamic'; for static shapes give "
                f"{CACHE_ARGUMENT}=S2Cache(config, max_length=...)"
            )
        given = model_kwargs.get(CACHE_ARGUMENT)
        # An assistant's tokens are taken back where they are wrong: it needs the full cache, as the model it helps.
        compact = given is None and wanted is None and not generation_config.is_assistant
        if generation_config.use_cache is not False and (compact or isinstance(given, S2Cache)):
            if generation_mode == GenerationMode.ASSISTED_GENERATION:
                raise ValueError(
                    "assisted decoding takes tokens back, and S2Cache cannot: blocks that left the window are gone; "
                    f"expected the full cache; give {CACHE_ARGUMENT}=DynamicCache()"
                )
            if compact:
                model_kwargs[CACHE_ARGUMENT] = S2Cache(self.config)
                return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
