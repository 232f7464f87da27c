"""The time of a training step, as a sum of parts.

Of a microbatch, on the GPUs of one pipeline stage (b tokens of a rank, h hidden, f feed-forward width, w width of Q, K
and V, a of the attention's output, V vocabulary; the widths of one tensor-parallel rank, 2 bytes a number in bf16):

- linear: FLOPs of forward and backward, and of the forward once more where it is recomputed, at the fitted FLOP rate.
- attention: Tables.attention for the pairs of the busiest rank; the forward twice where it is recomputed, unless
  --s2-keep-attention-output stores what it gave. The slowest tensor-parallel rank counts in each layer.
- context parallelism: bytes of the exchange plan at the measured cost per byte.
- tensor parallelism: an all-gather and a reduce-scatter of b h around attention and MLP, in both directions.
- memory: bytes of norms, RoPE, SwiGLU and residuals; cross entropy (50 bytes a logit: about ten passes in fp32; 28 with
  --cross-entropy-loss-fusion).

A step is (microbatches + (stages - 1) / chunks) microbatches of the slowest stage (the pipeline's bubble), then the
optimizer: about 34 bytes a parameter on its data-parallel share, 28 on all of them. Gradients are reduced and weights
gathered at the interconnect's rate; with --overlap-grad-reduce only what takes longer than the backward of a microbatch
counts.

What is missing: hosts that cannot keep up (short sequences), several hosts (the interconnect is taken as that of one),
data loading, checkpoints, logging.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from s2_megatron.config.sparsity import dense_pairs
from s2_megatron.context_parallel.plan import LayerCosts, layer_costs
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.tools.forecast.memory import rank_parameters
from s2_megatron.tools.forecast.run import TrainingRun
from s2_megatron.tools.forecast.tables import Tables

LOGIT_BYTES = 50  # fp32 copy, maximum, difference, exponential, sum, division, gradient, its bf16 copy
FUSED_LOGIT_BYTES = 28  # fp32 copy with the maximum, exponential with the sum, division, gradient
REPLICATED_BYTES, SHARDED_BYTES = 28, 34  # of the optimizer, a parameter: zero, accumulate, norm, clip; Adam and copies
UNFUSED_ROPE_PASSES, FUSED_ROPE_PASSES = 11, 2
HOST_GPUS = 8


@dataclass(frozen=True)
class StepTime:
    """seconds: {part: seconds of a step}. notes: what lies outside of the tables or was not measured."""

    seconds: dict[str, float]
    tokens: int
    gpus: int
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.total


@lru_cache(maxsize=512)
def _costs(pattern: Pattern, tp: int, cp: int, seq_length: int, comm_type: str, head_dim: int, itemsize: int, keep):
    """layer_costs of every tensor-parallel rank. Ranks of equal heads share theirs."""
    parts = dict.fromkeys(pattern.tensor_parallel_slice(rank, tp) for rank in range(tp))
    options = dict(head_dim=head_dim, itemsize=itemsize, keep_received=keep)
    return [layer_costs(part, cp, seq_length, comm_type, **options) for part in parts]


@lru_cache(maxsize=512)
def _busiest_pairs(pattern: Pattern, tp: int, seq_length: int) -> int:
    """Pairs of the tensor-parallel rank that has the most."""
    parts = {pattern.tensor_parallel_slice(rank, tp) for rank in range(tp)}
    return max(part.attended_pairs(seq_length) for part in parts)


def exchange_costs(run: TrainingRun, layer: int, comm_type: str) -> list[LayerCosts]:
    """What a layer's exchange costs, of every tensor-parallel rank that differs. comm_type: of S2's, or Megatron's with
    "te:" in front, whose ring sends K and V on and their gradients in fp32, and always receives them again."""
    length, options = run.sparsity.seq_length, (run.head_dim, run.itemsize)
    if comm_type == "te:a2a":
        return _costs(run.pattern(layer), run.tp, run.cp, length, "a2a", *options, run.keep_received)
    if comm_type.startswith("te:"):
        return _costs(run.pattern(layer), run.tp, run.cp, length, "all_gather", *options, False)
    return _costs(run.pattern(layer), run.tp, run.cp, length, comm_type, *options, run.keep_received)


class _Stage:
    """Seconds of one microbatch on one pipeline stage, by part, forward and backward apart."""

    def __init__(self, run: TrainingRun, tables: Tables, stage: int, notes: set[str]):
        self.run, self.tables, self.notes = run, tables, notes
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        layers, again = run.stage_layers(stage), run.recomputed(stage)
        known: dict[tuple, tuple[dict, dict]] = {}
        for layer in layers:
            at = run.attention(layer)
            kind = () if at is None else (run.sparsity.layers[at].spec, run.comm_type(at))
            key = kind, layer in again
            if key not in known:
                known[key] = self._layer(layer, layer in again)
            self._add(*known[key])
        if stage == run.pp - 1:
            self._add(*self._loss())

    def _add(self, forward: dict, backward: dict) -> None:
        for mine, more in ((self.forward, forward), (self.backward, backward)):
            for name, seconds in more.items():
                mine[name] = mine.get(name, 0.0) + seconds

    @property
    def seconds(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())

    def parts(self) -> dict[str, float]:
        return {name: self.forward.get(name, 0.0) + self.backward.get(name, 0.0) for name in self.forward}

    def _layer(self, layer: int, again: bool) -> tuple[dict, dict]:
        """Of a layer; the layers of one spec are taken as equal."""
        run, rates = self.run, self.tables
        tokens, size = run.rank_tokens, run.itemsize
        twice_mlp = again or (run.recompute == "selective" and "mlp" in run.recompute_modules)
        twice_core = again or (run.recompute == "selective" and "core_attn" in run.recompute_modules)
        at, has_mlp, halves = run.attention(layer), run.has_mlp(layer), run.halves(layer)
        twice_core &= not (run.keep_attention_output and at is not None and run.by_s2(at))

        mlp = run.mlp_weights if has_mlp else 0
        flops = 2 * tokens * run.weights(layer) / rates.flop_rate
        repeated = flops if again else 2 * tokens * mlp / rates.flop_rate if twice_mlp else 0.0

        shared = run.hidden // (run.tp if run.sequence_parallel else 1)
        roped = run.attention_width + (run.qkv_width - run.attention_width) // 2 if run.rope else 0
        rope = 0 if at is None else roped * (FUSED_ROPE_PASSES if run.fused_rope else UNFUSED_ROPE_PASSES)
        ffn, gates = run.ffn // run.tp if has_mlp else 0, 2 if run.gated else 1
        joined = 0 if at is None else 2 * run.qkv_width
        forward_bytes = tokens * size * (5 * halves * shared + rope + (gates + 1) * ffn)
        backward_bytes = tokens * size * (6 * halves * shared + rope + joined + (2 * gates + 1) * ffn)
        memory = forward_bytes / rates.byte_rate

        core, exchange = ((0.0, 0.0), (0.0, 0.0)) if at is None else self._attention(at)
        forward = {"linear layers": flops, "attention": core[0], "memory-bound layers": memory}
        backward = {
            "linear layers": 2 * flops + repeated,
            "attention": core[1] + (core[0] if twice_core else 0.0),
            "memory-bound layers": backward_bytes / rates.byte_rate + (memory if again else 0.0),
        }
        if run.cp > 1:
            forward["context-parallel exchange"] = exchange[0]
            backward["context-parallel exchange"] = exchange[1] + (exchange[0] if twice_core else 0.0)
        if run.tp > 1:
            sent = 2 * halves * tokens * run.hidden * size * (run.tp - 1) / run.tp / rates.interconnect_rate
            forward["tensor-parallel exchange"] = sent
            backward["tensor-parallel exchange"] = sent * (2 if again else 1)
            self.notes.add("tensor parallelism: no step with it was measured; its communication is taken as exposed")
        return forward, backward

    def _attention(self, layer: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """((forward, backward) seconds of the busiest rank's kernels, (forward, backward) of its exchange)."""
        run, length = self.run, self.run.sparsity.seq_length
        pattern, comm_type = run.pattern(layer), run.comm_type(layer)
        heads, kv_heads = run.sparsity.num_heads // run.tp, max(1, run.sparsity.num_kv_heads // run.tp)
        dense = run.sparsity.layers[layer].pattern is None
        pairs = dense_pairs(heads, length) if dense else _busiest_pairs(pattern, run.tp, length)
        # The whole sequence's time on one GPU, of which a context-parallel rank has its share of the pairs.
        whole = self.tables.attention(
            "S2" if run.by_s2(layer) else "dense",
            pairs * run.micro_batch,
            tokens=length * run.micro_batch,
            heads=heads,
            kv_heads=kv_heads * run.micro_batch,
            head_dim=run.head_dim,
            notes=self.notes,
        )
        if run.cp == 1:
            return (whole.forward, whole.backward), (0.0, 0.0)
        costs = exchange_costs(run, layer, comm_type)
        balance = 1.0 if dense and not run.by_s2(layer) else max(cost.balance for cost in costs)
        share = balance / run.cp
        per_byte = self.tables.exchange(comm_type, run.cp, length, self.notes)
        sent = [max(max(getattr(cost, f"sent_{kind}")) for cost in costs) for kind in ("forward", "backward")]
        seconds = tuple(run.micro_batch * count * rate for count, rate in zip(sent, per_byte))
        return (whole.forward * share, whole.backward * share), seconds

    def _loss(self) -> tuple[dict, dict]:
        """The output layer and the cross entropy."""
        run, rates = self.run, self.tables
        flops = 2 * run.rank_tokens * run.vocabulary_weights / rates.flop_rate
        passes = FUSED_LOGIT_BYTES if run.fused_loss else LOGIT_BYTES
        logits = run.rank_tokens * run.vocabulary // run.tp * passes / rates.byte_rate
        forward = {"linear layers": flops, "memory-bound layers": logits / 2}
        return forward, {"linear layers": 2 * flops, "memory-bound layers": logits / 2}


def step_time(run: TrainingRun, tables: Tables) -> StepTime:
    """The forecast of one training step. Raises ValueError for heads and lengths that the ranks cannot share."""
    notes: set[str] = set()
    stages = [_Stage(run, tables, stage, notes) for stage in range(run.pp)]
    slowest = max(stages, key=lambda stage: stage.seconds)
    seconds = {name: part * run.microbatches for name, part in slowest.parts().items()}
    if run.pp > 1:
        seconds["pipeline bubble"] = slowest.seconds * (run.pp - 1) / run.virtual
        notes.add("pipeline parallelism: no step with it was measured; its bubble is the schedule's formula")
    parameters = max(rank_parameters(run, stage) for stage in range(run.pp))
    replicas = run.dp * run.cp
    sharded = replicas if run.distributed_optimizer else 1
    accumulated = 0 if run.fused_gradients else 12 * run.microbatches
    optimizer = parameters * (REPLICATED_BYTES - 12 + accumulated + SHARDED_BYTES / sharded)
    seconds["optimizer"] = optimizer / tables.byte_rate
    if replicas > 1:
        # fp32 gradients are reduced and bf16 weights gathered, around a ring.
        reduced = 6 * parameters * (replicas - 1) / replicas / tables.interconnect_rate
        hidden = sum(slowest.backward.values()) if run.overlap_grad_reduce else 0.0
        seconds["gradient reduction"] = max(0.0, reduced - hidden)
    if run.gpus > HOST_GPUS:
        notes.add(f"{run.gpus} GPUs: more than one host; the interconnect is taken to be as fast as inside of a host")
    if not run.transformer_engine:
        text = "the steps were measured with Transformer Engine; local layers are slower"
        stock = any(not run.by_s2(layer) for layer in range(len(run.sparsity.layers)))
        text += ", and Megatron's local attention keeps its scores, which the memory lacks" * stock
        notes.add(f"--transformer-impl local: {text}")
    if run.symbols:
        notes.add("a HybridModel: no step with it was measured; its layers are taken as the halves of a GPT's")
    if run.fused_loss == "te":
        notes.add("--cross-entropy-fusion-impl te: not measured; taken as native")
    if run.itemsize != 2:
        notes.add("neither --bf16 nor --fp16: the steps were measured in bf16")
    return StepTime(seconds, run.step_tokens, run.gpus, tuple(sorted(notes)))
