"""The memory of the fullest GPU, tensor by tensor. Nothing is fitted.

What stays: weights, gradients (fp32 beside 16-bit weights), the optimizer (fp32 weights and Adam's two moments: 12
bytes a parameter, over the data- and context-parallel ranks with the distributed optimizer), the cosines of RoPE, the
workspaces of the matmul libraries (96 MiB with Transformer Engine), index data of S2's kernels.

What a step adds (numbers a token of the rank, 2 bytes each in bf16; h hidden size, f feed-forward size):

- a layer without recomputation keeps the norms' inputs and outputs (4 h), Q, K and V, RoPE's copies of Q and K beside
  them (V is a view of the projection's output, and pins it; Transformer Engine copies V instead), the output and LSE
  of the attention, the MLP's projection (2 f when gated) and its activation (f).
- with full recomputation only the layer's input (h), and with --s2-keep-attention-output output and LSE; selective
  recomputation of the core attention leaves out the LSE, of the MLP what lies behind its norm.

The largest moment is either the loss (all that the layers keep, final norm, logits in fp32 and in 16 bits) or the
backward of a layer (all that they keep, the layer recomputed, its gradients, what context parallelism received). With a
pipeline a stage keeps the activations of the microbatches that are under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from s2_megatron.context_parallel.plan import make_plan
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.tools.forecast.run import TrainingRun

WORKSPACES = 96 * 2**20
GIB = 2**30
EXCHANGE_BUFFERS = 3  # keys and values received, their gradients in fp32
LIST_BYTES = 8  # of index data, a (query block, key block) pair of a head


@dataclass(frozen=True)
class Memory:
    """parts: {part: bytes at the largest moment}. stage: the pipeline stage. at: "loss" or "backward of a layer"."""

    parts: dict[str, int]
    stage: int
    at: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def rank_parameters(run: TrainingRun, stage: int) -> int:
    """Parameters on one GPU of a pipeline stage."""
    count = sum(run.weights(layer) + run.halves(layer) * run.hidden for layer in run.stage_layers(stage))
    if stage == 0:
        count += run.vocabulary_weights + run.learned_positions * run.hidden
    if stage == run.pp - 1:
        count += run.hidden
        if not run.tied or run.pp > 1:
            count += run.vocabulary_weights
    return count


def _kept_layer(run: TrainingRun, layer: int, recompute: str) -> int:
    """Bytes a token that a layer keeps from its forward to its backward."""
    size, at = run.itemsize, run.attention(layer)
    ours = at is not None and run.by_s2(at)
    shared = run.hidden // (run.tp if run.sequence_parallel else 1)
    lse = 4 * run.sparsity.num_heads // run.tp
    output = size * run.attention_width
    if recompute == "full":
        return size * shared + (output + lse if ours and run.keep_attention_output else 0)
    modules = run.recompute_modules if recompute == "selective" else ()
    kv_width = (run.qkv_width - run.attention_width) // 2
    attention = size * run.qkv_width
    if run.rope and ours:
        attention += size * (run.attention_width + kv_width)
    keeps_lse = "core_attn" not in modules or (ours and run.keep_attention_output)
    attention += output + (lse if keeps_lse else 0)
    mlp = size * run.ffn // run.tp * (3 if run.gated else 2) + size * shared
    if "mlp" in modules:
        mlp = 0
    kept = run.halves(layer) * shared if run.dropout else 0
    if at is not None:
        kept += 2 * size * shared + attention
    return kept + size * shared + mlp if run.has_mlp(layer) else kept


def _hybrid_backward(run: TrainingRun, layers: list[int], again: set[int]) -> int:
    """The most bytes a token in the backward of a HybridModel's layer beside what the layers kept: the layers of its
    checkpoint, recomputed, and its gradients (see _gradients)."""
    size, most = run.itemsize, 0
    shared = run.hidden // (run.tp if run.sequence_parallel else 1)
    width, gates = run.ffn // run.tp, 2 if run.gated else 1
    step = 1 if run.recompute_method == "block" else min(run.recompute_layers, run.chunk_layers)
    for index, layer in enumerate(layers):
        first = index - index % run.chunk_layers % step
        group = [each for each in layers[first : first + step] if each in again] if layer in again else []
        redone = sum(_kept_layer(run, each, "none") - size * shared for each in group)
        gradients = gates * width
        if run.attention(layer) is not None:
            behind = layers[index + 1] if index + 1 < len(layers) else layer
            freed = run.has_mlp(behind) and (behind in group if layer in again else behind not in again)
            gradients = run.attention_width + 2 * run.qkv_width - ((gates + 1) * width + run.hidden) * freed
        most = max(most, redone + size * (run.hidden + max(0, gradients)))
    return most


def _gradients(run: TrainingRun) -> int:
    """The most bytes a token that a layer's backward holds beside what the layer kept.

    Always the output's gradient. In SwiGLU's backward its gradients in and out, when the activation has been freed; or
    in the attention's, when the MLP has been freed, the gradients of its output, of Q, K and V, and of these three
    joined."""
    width, gates = run.ffn // run.tp, 2 if run.gated else 1
    freed = (gates + 1) * width + run.hidden
    attention = run.attention_width + 2 * run.qkv_width - freed
    return run.itemsize * (run.hidden + max(gates * width, attention))


def _logit_bytes(run: TrainingRun) -> int:
    """Bytes a logit at the loss: as the model gives it, and in fp32; Megatron's fused cross entropy writes the
    exponential beside the latter, not into it."""
    return run.itemsize + (8 if run.fused_loss else 4)


@lru_cache(maxsize=512)
def _plan_slots(pattern: Pattern, tp: int, cp: int, n_blocks: int) -> int:
    """Blocks of keys that the busiest rank receives."""
    parts = {pattern.tensor_parallel_slice(rank, tp) for rank in range(tp)}
    return max(max(make_plan(part, 0, cp, n_blocks).needed_slots) for part in parts)


def received(run: TrainingRun, layer: int) -> int:
    """Bytes of keys and values that a rank receives in a layer."""
    if run.cp == 1:
        return 0
    sparsity, comm_type = run.sparsity, run.comm_type(layer)
    slot = 2 * sparsity.block_size * run.head_dim * run.itemsize * run.micro_batch
    groups = max(1, sparsity.num_kv_heads // run.tp)
    if comm_type == "sparse":
        return slot * _plan_slots(run.pattern(layer), run.tp, run.cp, sparsity.n_blocks)
    if comm_type.endswith("all_gather"):
        return slot * groups * (sparsity.n_blocks - sparsity.n_blocks // run.cp)
    if comm_type.endswith("a2a"):
        return run.itemsize * run.rank_tokens * (run.qkv_width + run.attention_width)
    if not comm_type.endswith("p2p"):
        raise ValueError(f"no exchange is known as {comm_type!r}; expected sparse, all_gather, a2a or a kind of p2p")
    return 2 * slot * groups * sparsity.n_blocks // run.cp  # the ring holds one part and receives the next


@lru_cache(maxsize=512)
def _nonzeros(pattern: Pattern, n_blocks: int) -> int:
    """(query block, key block) pairs that are stored: of a mask each table's once, of ranges each head's."""
    if isinstance(pattern, BlockMaskPattern):
        return sum(int(indptr[min(n_blocks, len(indptr) - 1)]) for indptr, _ in pattern.tables)
    return pattern.nonzeros(n_blocks)


def _attention(run: TrainingRun, stage: int) -> list[int]:
    """Which of run.sparsity.layers a pipeline stage holds."""
    found = [run.attention(layer) for layer in run.stage_layers(stage)]
    return [at for at in found if at is not None]


def index_bytes(run: TrainingRun, stage: int) -> int:
    """Index data of S2's kernels: a few KB for ranges; lists for block masks and for context-parallel ranks, whose keys
    are placed elsewhere (not for a2a). Patterns that layers share are stored once."""
    patterns = {(run.pattern(at), run.comm_type(at)) for at in _attention(run, stage) if run.by_s2(at)}
    total = 0
    for pattern, comm_type in patterns:
        placed = run.cp > 1 and comm_type != "a2a"
        if placed or isinstance(pattern, BlockMaskPattern):
            pairs = _nonzeros(pattern, run.sparsity.n_blocks) // run.tp
            total += LIST_BYTES * pairs // (run.cp if placed else 1)
        else:
            total += 32 * pattern.num_heads
    return total


def _in_flight(run: TrainingRun, stage: int) -> float:
    """Microbatches whose activations a stage holds at once: 1F1B, or with chunks the interleaved schedule."""
    if run.pp == 1:
        return 1.0
    if run.virtual == 1:
        return min(run.microbatches, run.pp - stage)
    chunks = 2 * (run.pp - stage - 1) + (run.virtual - 1) * run.pp + 1
    return min(run.microbatches * run.virtual, chunks) / run.virtual


def _stage_memory(run: TrainingRun, stage: int) -> Memory:
    parameters, tokens, size = rank_parameters(run, stage), run.rank_tokens, run.itemsize
    mixed = size == 2
    shards = run.dp * run.cp if run.distributed_optimizer else 1
    layers, again, firsts = run.stage_layers(stage), run.recomputed(stage), _checkpoints(run, stage)
    shared = run.hidden // (run.tp if run.sequence_parallel else 1)
    kept = sum(_kept_layer(run, layer, "full") for layer in layers if layer in again and layer in firsts)
    others = "selective" if run.recompute == "selective" else "none"
    kept += sum(_kept_layer(run, layer, others) for layer in layers if layer not in again)
    # A layer behind the first of its checkpoint stores what S2 keeps, no input.
    kept += sum(
        _kept_layer(run, layer, "full") - size * shared for layer in layers if layer in again and layer not in firsts
    )
    attention = _attention(run, stage)
    exchange = max((received(run, at) for at in attention), default=0)
    stored_exchange = sum(received(run, at) for at in attention if run.by_s2(at)) if run.keep_received else 0
    parts = {
        "weights": parameters * size,
        "gradients": parameters * 4,
        "optimizer": parameters * (12 if mixed else 8) // shards,
        "RoPE and workspaces": WORKSPACES + (4 * run.head_dim * tokens // run.micro_batch if run.rope else 0),
        "index data": index_bytes(run, stage),
        "activations": int(kept * tokens * _in_flight(run, stage)),
        "received keys and values": int(stored_exchange * _in_flight(run, stage)),
    }
    loss = 0
    if stage == run.pp - 1:
        loss = tokens * (2 * size * run.hidden + _logit_bytes(run) * run.vocabulary // run.tp)
    group = min(run.recompute_layers, run.chunk_layers) if run.recompute_method == "uniform" else 1
    # The input of a recomputed layer is among the activations already.
    redone = max((_kept_layer(run, layer, "none") - size * shared for layer in again), default=0) * group
    gradients = tokens * (_hybrid_backward(run, layers, again) if run.symbols else redone + _gradients(run))
    if loss >= gradients + EXCHANGE_BUFFERS * exchange:
        return Memory({**parts, "logits and loss": loss}, stage, "loss")
    largest = {"recomputed layer and its gradients": gradients, "exchange buffers": EXCHANGE_BUFFERS * exchange}
    return Memory({**parts, **largest}, stage, "backward of a layer")


def _checkpoints(run: TrainingRun, stage: int) -> set[int]:
    """Of the layers of a stage, those that are the first of a checkpoint if they are recomputed. Megatron counts them
    from the first layer of every chunk."""
    layers, step = run.stage_layers(stage), 1 if run.recompute_method == "block" else run.recompute_layers
    return {layer for at, layer in enumerate(layers) if at % run.chunk_layers % step == 0}


def memory(run: TrainingRun) -> Memory:
    """The forecast for the fullest GPU. Raises ValueError for heads and lengths that the ranks cannot share."""
    return max((_stage_memory(run, stage) for stage in range(run.pp)), key=lambda found: found.total)
