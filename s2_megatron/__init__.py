"""S2-Attention in Megatron: sparse, sharded-context attention as a Megatron-core attention module.

    from s2_megatron import build_layout, make_range_pattern, s2_attention     # the op
    from s2_megatron import add_s2_arguments, apply_s2, prepare_s2             # a training script of Megatron's
    from s2_megatron import load_config                                        # a sparsity YAML

Importing the package imports neither Megatron nor Triton nor torch: each name is imported when it is first asked for.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "add_s2_arguments": "s2_megatron.megatron.arguments",
    "apply_s2": "s2_megatron.megatron.layer_specs",
    "build_layout": "s2_megatron.ops.layout",
    "load_config": "s2_megatron.config.load",
    "make_range_pattern": "s2_megatron.patterns.ranges",
    "prepare_s2": "s2_megatron.megatron.arguments",
    "s2_attention": "s2_megatron.ops.api",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
