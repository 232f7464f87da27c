"""FLOPs of a training step, as Megatron counts them: forward and backward of the model, recomputation left out.

6 FLOP per weight of a matrix and token (2 in the forward, 4 in the backward); attention 12 D per attended (query, key)
pair of a head of dim D (4 in the forward, 8 in the backward). The output layer counts, the embedding does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from s2_megatron.config.sparsity import dense_pairs
from s2_megatron.tools.forecast.hybrid import NOT_MEASURED
from s2_megatron.tools.forecast.run import TrainingRun


@dataclass(frozen=True)
class TokenFlops:
    """FLOP per token of the sequence, forward and backward, of the whole model."""

    linear: float
    attention: float
    dense_attention: float

    @property
    def model(self) -> float:
        return self.linear + self.attention

    @property
    def dense_model(self) -> float:
        """With dense attention in every layer."""
        return self.linear + self.dense_attention


def token_flops(run: TrainingRun) -> TokenFlops:
    sparsity, length = run.sparsity, run.sparsity.seq_length
    heads = sparsity.num_heads
    qkv = (heads + 2 * sparsity.num_kv_heads) * run.head_dim
    attention, mlp = run.hidden * (qkv + heads * run.head_dim), run.hidden * (3 if run.gated else 2) * run.ffn
    mlps = run.symbols.count("-") if run.symbols else len(sparsity.layers)
    linear = 6.0 * (len(sparsity.layers) * attention + mlps * mlp + run.hidden * run.vocabulary)
    linear += sum(3.0 * run.hybrid.flops(symbol) for symbol in run.symbols if symbol in NOT_MEASURED)
    pairs = sum(sparsity.layer_pairs(layer) for layer in sparsity.layers)
    dense = len(sparsity.layers) * dense_pairs(heads, length)
    return TokenFlops(linear, 12.0 * run.head_dim * pairs / length, 12.0 * run.head_dim * dense / length)
