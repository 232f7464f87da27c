"""The layers of Megatron's HybridModel that no GPT has in this form, and what is known of each.

FLOPs are Megatron's own formulas (`num_floating_point_operations`), a token's, forward; a test compares them.
Parameters are counted of attention (`*`), dense MLPs (`-`) and experts (`E`). Memory and step time are forecast of `*`
and `-`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from s2_megatron.config.errors import printable
from s2_megatron.megatron.sparsity import layer_symbols

NAMES = {"*": "attention", "-": "MLP", "E": "experts", "M": "Mamba", "G": "gated delta net"}
OTHERS = {"D": "DSA", "+": "multi-latent attention"}  # of which nothing is counted
# Why there is no forecast of memory and step time with these layers.
NOT_MEASURED = {"E": "mixture of experts", "M": "Mamba", "G": "gated delta nets"}


@dataclass(frozen=True)
class HybridSizes:
    """Sizes of the layers E, M and G by Megatron's flags of these names, with Megatron's values where none is given.
    hidden, gated: of the whole model. shared: the width of the shared experts, 0 without. latent: 0 without."""

    hidden: int
    gated: bool
    experts: int
    moe_ffn: int
    topk: int
    shared: int
    latent: int
    mamba_state: int
    mamba_groups: int
    mamba_heads: int
    key_dim: int  # over all heads
    value_dim: int
    value_head: int
    value_heads: int
    kernel: int

    def flops(self, symbol: str) -> float:
        """Of a layer E, M or G."""
        if symbol == "E":
            gates, routed = (3 if self.gated else 2), self.latent or self.hidden
            projections = 4 * self.hidden * self.latent
            return 2 * gates * (routed * self.moe_ffn * self.topk + self.hidden * self.shared) + projections
        if symbol == "M":
            inner = 2 * self.hidden
            wide = 2 * inner + 2 * self.mamba_groups * self.mamba_state + self.mamba_heads
            return 2 * self.hidden * wide + 7 * inner * self.mamba_state + 2 * inner * self.hidden
        rule = 4 * self.value_heads * self.value_head**2
        wide = 2 * self.key_dim + 2 * self.value_dim + 2 * self.value_heads
        convolution = self.kernel * (2 * self.key_dim + self.value_dim)
        return 2 * (self.hidden * wide + convolution + rule + self.hidden * self.value_dim)

    def expert_weights(self, active: bool) -> int:
        """Parameters of a layer E without its norm: of all experts, or of those that a token sees."""
        gates, routed = (3 if self.gated else 2), self.latent or self.hidden
        count = self.topk if active else self.experts
        shared = gates * self.hidden * self.shared
        return gates * routed * self.moe_ffn * count + shared + self.hidden * (self.experts + 2 * self.latent)


def hybrid_sizes(args: Namespace, ffn: int) -> HybridSizes:
    """args: of flags.read_flags. ffn: of the dense MLPs."""
    value_head, value_heads = args.linear_value_head_dim or 128, args.linear_num_value_heads or 32
    return HybridSizes(
        hidden=args.hidden_size,
        gated=args.swiglu,
        experts=args.num_experts or 0,
        moe_ffn=args.moe_ffn_hidden_size or ffn,
        topk=args.moe_router_topk,
        shared=args.moe_shared_expert_intermediate_size or 0,
        latent=args.moe_latent_size or 0,
        mamba_state=args.mamba_state_dim,
        mamba_groups=args.mamba_num_groups,
        mamba_heads=args.mamba_num_heads or 2 * args.hidden_size // max(1, args.mamba_head_dim),
        key_dim=(args.linear_key_head_dim or 128) * (args.linear_num_key_heads or 16),
        value_dim=value_head * value_heads,
        value_head=value_head,
        value_heads=value_heads,
        kernel=args.linear_conv_kernel_dim or 4,
    )


def refused_layers(pattern: str) -> tuple[list[str], bool]:
    """(why there is no forecast with this --hybrid-layer-pattern, whether FLOPs and parameters are known). Raises
    ValueError for a symbol that Megatron does not know."""
    flag, symbols = f"--hybrid-layer-pattern {printable(pattern, 200)}", layer_symbols(pattern)
    if wrong := set(pattern) - {*NAMES, *OTHERS, "|", "/"}:
        raise ValueError(
            f"{flag}: no layer is called {printable(''.join(sorted(wrong)), 20)}; expected some of "
            f"{' '.join([*NAMES, *OTHERS])}; correct it"
        )
    found = [f"{flag}: layers {symbol}, {NOT_MEASURED[symbol]}" for symbol in NOT_MEASURED if symbol in symbols]
    unknown = [symbol for symbol in OTHERS if symbol in symbols]
    found += [f"{flag}: layers {symbol}, {OTHERS[symbol]}" for symbol in unknown]
    if "/" in pattern:
        found.append(f"{flag}: multi-token prediction")
    if len({len(stage) for stage in pattern.partition("/")[0].split("|")}) > 1:
        found.append(f"{flag}: uneven pipeline stages")
    return found, not unknown and "/" not in pattern
