"""What s2_megatron.vllm.model takes from vLLM, as plain PyTorch on one text: which heads meet which, and not vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import linear


class Ranks:
    size, rank = 1, 0


class Registry:
    def __init__(self):
        self.models = {}

    def register_model(self, architecture, place):
        self.models[architecture] = place


class Attention(nn.Module):
    """Of one text [T, heads x D]. Remembers every one that was made, by its name."""

    made: dict = {}  # noqa: RUF012
    attn_backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")

    def __init__(self, heads, head_dim, scale, num_kv_heads, per_layer_sliding_window, prefix, sinks=None, **_):
        super().__init__()
        assert prefix not in self.made, f"Duplicate layer name: {prefix}"
        assert sum(part.isdigit() for part in prefix.split(".")) == 1, prefix  # the layer's number
        self.made[prefix] = self
        self.shape, self.scale, self.sinks = (heads, num_kv_heads, head_dim), scale, sinks
        self.window = per_layer_sliding_window

    def forward(self, query, key, value):
        heads, kv_heads, dim = self.shape
        query, key, value = (
            each.view(len(each), -1, dim).transpose(0, 1).repeat_interleave(heads // count, 0)
            for each, count in ((query, heads), (key, kv_heads), (value, kv_heads))
        )
        assert len(query) == len(key) == len(value)
        distance = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])
        seen = (distance >= 0) & (distance < (self.window or len(distance)))
        scores = (self.scale * query @ key.mT).masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        weights = scores.softmax(-1)[..., : len(distance)]
        return (weights @ value).transpose(0, 1).flatten(1)


class QKVParallelLinear(nn.Module):
    def __init__(self, hidden, head_dim, heads, kv_heads, bias, **_):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.bias = heads, kv_heads, head_dim, bias

    def load(self, projections: list[nn.Linear]):
        """A rank's rows of query, key and value."""
        self.parts = []
        for projection, heads in zip(projections, (self.heads, self.kv_heads, self.kv_heads), strict=True):
            copies = max(1, Ranks.size // heads)  # of a KV head
            count, first = max(1, heads // Ranks.size) * self.dim, Ranks.rank // copies
            rows = slice(first * count, (first + 1) * count)
            self.parts.append((projection.weight[rows], projection.bias[rows] if self.bias else None))

    def forward(self, hidden):
        return torch.cat([linear(hidden, *part) for part in self.parts], -1), None


class RowParallelLinear(nn.Module):
    """A rank's part of the sum."""

    def __init__(self, width, hidden, bias, **_):
        super().__init__()
        assert not bias
        self.width = width // Ranks.size

    def load(self, projection: nn.Linear):
        self.weight = projection.weight[:, Ranks.rank * self.width :][:, : self.width]

    def forward(self, heads):
        return linear(heads, self.weight), None


class RMSNorm(nn.RMSNorm):
    def __init__(self, size, eps):
        super().__init__(size, eps=eps)


def get_rope(head_dim, max_position, rope_parameters):
    inverse = rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)

    def turned(heads, positions):
        halves = heads.unflatten(-1, (-1, 2, head_dim // 2))
        angles = (positions[:, None] * inverse)[:, None]
        one, two = halves.unbind(-2)
        turned = (one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin())
        return torch.stack(turned, -2).flatten(-3)

    return lambda positions, query, key: (turned(query, positions), turned(key, positions))


def layer_index(name):
    (index,) = [int(part) for part in name.split(".") if part.isdigit()]
    return index


class LlamaDecoderLayer(nn.Module):
    pass


class LlamaForCausalLM(nn.Module):
    def __init__(self, *, vllm_config, prefix, layer_type):
        super().__init__()


def set_weight_attrs(weight, attributes):
    for name, value in attributes.items():
        setattr(weight, name, value)


def install(monkeypatch) -> SimpleNamespace:
    """The modules of vLLM, until the test ends; `registry` and `warnings` of it."""
    registry, warnings = Registry(), []
    logger = SimpleNamespace(info=lambda *_: None, warning=lambda text, *values: warnings.append(text % values))
    contents = {
        "vllm": dict(ModelRegistry=registry, __version__="0.32.0"),
        "vllm.config": dict(VllmConfig=object),
        "vllm.distributed": dict(
            get_tensor_model_parallel_rank=lambda: Ranks.rank,
            get_tensor_model_parallel_world_size=lambda: Ranks.size,
        ),
        "vllm.logger": dict(init_logger=lambda _: logger),
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": dict(Attention=Attention),
        "vllm.model_executor.layers.layernorm": dict(RMSNorm=RMSNorm),
        "vllm.model_executor.layers.linear": dict(
            QKVParallelLinear=QKVParallelLinear, RowParallelLinear=RowParallelLinear
        ),
        "vllm.model_executor.layers.rotary_embedding": dict(get_rope=get_rope),
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.llama": dict(
            LlamaDecoderLayer=LlamaDecoderLayer, LlamaForCausalLM=LlamaForCausalLM
        ),
        "vllm.model_executor.models.utils": dict(extract_layer_index=layer_index),
        "vllm.model_executor.utils": dict(set_weight_attrs=set_weight_attrs),
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "s2_megatron.vllm.model", raising=False)
    monkeypatch.setattr(Ranks, "size", 1)
    monkeypatch.setattr(Ranks, "rank", 0)
    monkeypatch.setattr(Attention, "made", {})
    return SimpleNamespace(registry=registry, warnings=warnings)
