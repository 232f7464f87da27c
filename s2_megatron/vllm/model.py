"""The model in vLLM: its Llama, with an attention of several: one for each group of KV heads that see the same keys.

Each has a name and a cache of its own, so that vLLM's hybrid cache manager frees what the windows of a group have left
behind, and keeps all keys of dense heads. T tokens of all requests; a rank has H query heads, G KV heads, of D numbers.
"""

from __future__ import annotations

from collections import Counter

import torch
import vllm
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from s2_megatron.huggingface import S2GPTConfig
from s2_megatron.vllm.head_groups import Windows, group_size, head_groups, kv_head_windows, local_kv_heads

PROVEN = "0.32."  # releases of vLLM whose log-probabilities were compared with Megatron's (tests/engines)
# vLLM's backends that take the number of heads from the layer; others take the model's, which a group has not.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")

logger = init_logger("vllm.s2_megatron")


class S2GPTAttention(nn.Module):
    """The arguments are those that LlamaDecoderLayer gives to its attention. Raises ValueError for a backend that would
    take the model's number of heads for a group's."""

    def __init__(
        self, config: S2GPTConfig, hidden_size: int, num_heads: int, num_kv_heads: int, max_position_embeddings: int,
        quant_config, bias: bool, bias_o_proj: bool, cache_config, prefix: str, attn_type: str,
    ):  # fmt: skip
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        layers = kv_head_windows(config.sparsity)
        local = local_kv_heads(num_kv_heads, ranks, rank)
        size = group_size(layers, ranks)
        groups = head_groups(layers[extract_layer_index(prefix)], local, size)
        self.head_dim = config.head_dim
        heads, ratio = num_heads // ranks, num_heads // ranks // len(local)
        self.sizes = heads * self.head_dim, len(local) * self.head_dim
        self.group_sizes = size * ratio * self.head_dim, size * self.head_dim
        self.qkv_proj = QKVParallelLinear(
            hidden_size, self.head_dim, num_heads, num_kv_heads, bias=bias, quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim, hidden_size, bias=bias_o_proj, quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.rotary_emb = get_rope(
            self.head_dim, max_position=max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

        order = [head - local.start for group in groups for head in group.kv_heads]
        self.reordered = order != sorted(order)  # else the groups are slices
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.register_buffer("back", torch.tensor(order).argsort(), persistent=False)
        query_heads = [rank * heads + head * ratio + member for head in order for member in range(ratio)]
        sinks = self._softmax_offsets(config.softmax_type, query_heads)
        scale = config.sparsity.softmax_scale
        self.attn = nn.ModuleList(
            Attention(
                size * ratio, self.head_dim, self.head_dim**-0.5 if scale is None else scale, num_kv_heads=size,
                cache_config=cache_config, quant_config=quant_config, per_layer_sliding_window=group.window,
                attn_type=attn_type, prefix=f"{prefix}.attn.kv_head_{group.kv_heads[0]}",
                **{} if sinks is None else dict(sinks=sinks[place * size * ratio : (place + 1) * size * ratio]),
            )
            for place, group in enumerate(groups)
        )  # fmt: skip
        backend = self.attn[0].attn_backend.get_name()
        if len(groups) > 1 and backend not in BACKENDS:
            raise ValueError(
                f"vLLM: the attention backend {backend} for a layer whose KV heads are split; expected one of "
                f"{', '.join(BACKENDS)}, which take the number of heads from the layer; use --attention-backend"
            )

    def _softmax_offsets(self, softmax_type: str, query_heads: list[int]) -> torch.Tensor | None:
        """[H], in the order of the groups: views of it are what the attentions get. query_heads: of the model."""
        if softmax_type == "vanilla":
            return None
        if softmax_type == "off-by-one":
            return torch.zeros(len(query_heads))
        self.sinks = nn.Parameter(torch.empty(len(query_heads)), requires_grad=False)
        set_weight_attrs(
            self.sinks, {"weight_loader": lambda parameter, loaded: parameter.data.copy_(loaded[query_heads])}
        )
        return self.sinks.data

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions [T], hidden_states [T, hidden]; returns [T, hidden]."""
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([self.sizes[0], self.sizes[1], self.sizes[1]], dim=-1)
        if self.qk_norm:
            query = self.q_norm(query.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            key = self.k_norm(key.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        query, key = self.rotary_emb(positions, query, key)
        if self.reordered:
            query, key, value = (self._by_kv_head(each, self.order) for each in (query, key, value))
        queries = query.split(self.group_sizes[0], dim=-1)
        keys, values = (each.split(self.group_sizes[1], dim=-1) for each in (key, value))
        out = torch.cat([attend(*qkv) for attend, *qkv in zip(self.attn, queries, keys, values)], dim=-1)
        if self.reordered:
            out = self._by_kv_head(out, self.back)
        return self.o_proj(out)[0]

    def _by_kv_head(self, heads: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """[T, G x anything] with the KV heads in another order."""
        return heads.unflatten(-1, (order.numel(), -1)).index_select(-2, order).flatten(-2)


class S2GPTDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: S2GPTConfig | None = None):
        super().__init__(vllm_config, prefix, config, attn_layer_type=S2GPTAttention)


def _require_own_caches(layers: tuple[Windows, ...], softmax_type: str, vllm_config: VllmConfig) -> None:
    """Raises ValueError for softmax offsets in attentions of unlike windows that are to share a cache: vLLM's CPU
    backend then plans them as dense, and what a window does not reach comes out as noise."""
    alike = len({window for windows in layers for window in windows}) == 1
    if softmax_type != "vanilla" and not alike and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            f"vLLM: disable_hybrid_kv_cache_manager=True for softmax_type={softmax_type} and unlike windows, which "
            "vLLM then computes wrongly (CPU_ATTN); expected False; leave --disable-hybrid-kv-cache-manager out, and "
            "transfers of caches (--kv-transfer-config) that need it"
        )


class S2GPTForCausalLM(LlamaForCausalLM):
    """Raises ValueError for experts, and for a plan that vLLM's attention does not compute, or not with these settings,
    before any weight is made."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        if not vllm.__version__.startswith(PROVEN):
            logger.warning(
                "vLLM %s: models of type s2_gpt were compared with Megatron's in %sx alone", vllm.__version__, PROVEN
            )
        if config.num_experts is not None:
            raise ValueError(
                f"vLLM: a model of type s2_gpt with num_experts={config.num_experts}; expected one without experts, "
                "which is what our plugin builds; run it in transformers (S2Cache) or with `s2-megatron generate`, or, "
                "if its layers are dense or have one exact window, export it with --stock, which vLLM runs by itself"
            )
        layers = kv_head_windows(config.sparsity)
        _require_own_caches(layers, config.softmax_type, vllm_config)
        seen = Counter(window for windows in layers for window in windows)
        logger.info(
            "s2_gpt: of the KV heads of all layers %d are dense%s; each attention has %d",
            seen.pop(None, 0),
            "".join(f", {heads} have a window of {window} tokens" for window, heads in sorted(seen.items())),
            group_size(layers, vllm_config.parallel_config.tensor_parallel_size),
        )
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=S2GPTDecoderLayer)
