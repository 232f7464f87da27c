"""Megatron's throughput counts the (query, key) pairs that are really attended; the dense-equivalent stands beside it.

Megatron counts a layer's core attention as that of dense causal attention: 12 D H sum(L^2)/2 FLOPs (forward and
backward) for H heads of dim D over sequences of length L, i.e. 12 D for each of the L^2/2 pairs of a head, and its
formula is linear in sum(L^2). So a model with S2 layers has the FLOPs that Megatron's own formula gives for an
*effective* sum(L^2): the real one in its dense layers, twice the attended pairs of a head in its S2 layers, the mean
over both. Nothing else of the formula is repeated here, so MoE, MTP and GQA follow Megatron.

FlopAccounting has what takes the place of four functions of `megatron.training.training` (patches.py puts it there):

- `num_floating_point_operations` uses the effective sum(L^2).
- `update_seqlen_stats_from_cu_seqlens` also adds up the attended pairs of packed documents, on the device, and only
  while training: Megatron's own also counts an evaluation's documents in the next iteration. With virtual pipeline
  stages it is called once per stage and microbatch; the sums are divided by their number.
- `consume_seqlen_stats_in_iteration` reads these sums once per logging interval (and before a checkpoint) instead of
  once per iteration.
- `training_log` gets the mean over that interval, and reports the dense-equivalent throughput after Megatron's line.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import Counter

import numpy as np
import torch

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.patterns.tokens import joined


class PairTable:
    """How many pairs a document of any length attends, summed over all S2 layers and their query heads. Looked up on
    the device.

    limit: the longest document, in tokens.
    """

    def __init__(self, patterns: list[Pattern], block_size: int, limit: int):
        self.block_size = block_size
        n_blocks = -(-limit // block_size)
        terms = []
        for pattern, layers in _counted(patterns):
            assert pattern.block_size == block_size, (pattern.block_size, block_size)
            terms += [(layers * weights, keys) for weights, keys in pattern.row_terms(n_blocks)]
        nothing = np.zeros(n_blocks, dtype=np.int64), np.zeros(block_size, dtype=np.int64)
        terms = joined(terms) or [nothing]  # every layer is dense
        before = np.concatenate([[0], np.cumsum(sum(weights * keys.sum() for weights, keys in terms))])
        weights = np.stack([np.append(weights, 0) for weights, _ in terms])
        rows = np.stack([np.append(0, np.cumsum(keys[:-1])) for _, keys in terms])
        # fp64 holds these integers exactly up to 2^53 pairs; float, because Megatron's other two sums are.
        self.before, self.weights, self.rows = (
            torch.from_numpy(table.astype(np.float64))
            for table in (before, weights, rows)  # of the query blocks before this one; of the first rows of a block
        )

    def pairs(self, lengths: torch.Tensor) -> torch.Tensor:
        """lengths: integers [n], tokens of each document, on any device. Returns fp64 [n]: attended pairs."""
        if self.before.device != lengths.device:
            tables = self.before, self.weights, self.rows
            self.before, self.weights, self.rows = (table.to(lengths.device) for table in tables)
        lengths = lengths.to(torch.int64)
        block, row = lengths // self.block_size, lengths % self.block_size
        return self.before[block] + (self.weights[:, block] * self.rows[:, row]).sum(0)


def _counted(patterns: list[Pattern]) -> list[tuple[Pattern, int]]:
    """Equal layers share one Pattern object: [(pattern, number of layers)]."""
    by_identity = {id(pattern): pattern for pattern in patterns}
    return [(by_identity[key], count) for key, count in Counter(map(id, patterns)).items()]


class _SquaredLengths(float):
    """sum(L^2) of packed documents, as a float that also carries their attended pairs through Megatron's training
    loop."""

    pairs: float

    def __new__(cls, value: float, pairs: float):
        self = super().__new__(cls, value)
        self.pairs = pairs
        return self


class _Flops(float):
    """FLOPs of one global batch, as a float that also carries the dense-equivalent FLOPs. The division by the elapsed
    time, which Megatron does, tells the accounting both throughputs."""

    dense: float
    accounting: FlopAccounting

    def __new__(cls, value: float, dense: float, accounting: FlopAccounting):
        self = super().__new__(cls, value)
        self.dense, self.accounting = dense, accounting
        return self

    def __truediv__(self, seconds):
        self.accounting.throughputs = (float(self) / seconds, self.dense / seconds)
        return float(self) / seconds


class FlopAccounting:
    """Counts for one run. `original`: Megatron's own four functions by name."""

    def __init__(self, args: Namespace, sparsity: ResolvedSparsity, original: dict):
        self.original = original
        patterns = [layer.pattern for layer in sparsity.all_layers if layer.pattern is not None]
        self.num_layers, self.num_s2_layers = len(sparsity.all_layers), len(patterns)
        self.num_heads = sparsity.num_heads
        self.sequence_pairs = sum(pattern.attended_pairs(args.seq_length) for pattern in patterns)
        self.table = PairTable(patterns, sparsity.block_size, args.seq_length)
        self.log_signature = inspect.signature(original["training_log"])
        self.sums: torch.Tensor | None = None  # fp64 [3] on the device: tokens, squared lengths, attended pairs
        self.interval = np.zeros(3)  # the same, of the whole batch, read since the last log
        self.interval_iterations = 0
        self.started = self.packed = False
        self.throughputs: tuple[float, float] | None = None  # attended, dense-equivalent: TFLOP/s/GPU of the last log

    def flops(self, args, batch_size, seqlen_squared_sum_in_batch=None, total_real_tokens_in_batch=None):
        """In place of Megatron's `num_floating_point_operations`: FLOPs of one global batch, forward and backward."""
        original = self.original["num_floating_point_operations"]
        squares, pairs = seqlen_squared_sum_in_batch, getattr(seqlen_squared_sum_in_batch, "pairs", None)
        if squares is None:
            squares, pairs = batch_size * args.seq_length**2, batch_size * self.sequence_pairs
        elif pairs is None:
            raise ValueError(
                "seqlen_squared_sum_in_batch says nothing of the attended pairs of packed documents; pass what "
                "megatron.training.training.consume_seqlen_stats_in_iteration() returns"
            )
        dense_layers = self.num_layers - self.num_s2_layers
        effective = (dense_layers * squares + 2 * pairs / self.num_heads) / self.num_layers
        flops, dense = (
            original(args, batch_size, float(total), total_real_tokens_in_batch) for total in (effective, squares)
        )
        return _Flops(flops, dense, self)

    def add_documents(self, cu_seqlens: torch.Tensor | None) -> None:
        """In place of Megatron's `update_seqlen_stats_from_cu_seqlens`. cu_seqlens: int32 [documents + 1], without
        padding. Does not wait for the device."""
        if cu_seqlens is None or cu_seqlens.numel() < 2 or not torch.is_grad_enabled():
            return
        if self.sums is None:
            on_gpu = torch.cuda.is_available()  # where the sum over all ranks has to be taken
            self.sums = torch.zeros(
                3, dtype=torch.float64, device=torch.cuda.current_device() if on_gpu else cu_seqlens.device
            )
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(self.sums.device)
        exact = lengths.to(torch.float64)
        self.sums += torch.stack([exact.sum(), (exact * exact).sum(), self.table.pairs(lengths).sum()])
        self.packed = True

    def _is_read(self, args: Namespace) -> bool:
        """Whether the sums are needed after this iteration: for a log, a checkpoint, or the end of the run."""
        iteration = args.curr_iteration + 1
        intervals = (
            args.log_interval,
            args.save and args.save_interval,
            args.non_persistent_save_interval,
            args.exit_interval,
        )
        return (
            not self.started
            or iteration >= args.train_iters
            or any(step and iteration % step == 0 for step in intervals)
        )

    def consume(self) -> tuple[float | None, float | None]:
        """In place of Megatron's `consume_seqlen_stats_in_iteration`: (real tokens, sum(L^2)) of the global batch, or
        (None, None) for unpacked batches. Between the iterations in which they are read it returns zeros, and their
        work comes with the next reading."""
        if not self.packed:
            return None, None
        from megatron.training.global_vars import get_args

        args = get_args()
        self.interval_iterations += 1
        if not self._is_read(args):
            return 0.0, _SquaredLengths(0.0, 0.0)
        self.started = True
        tokens, squares, pairs = read = self._sum_over_ranks(args)
        self.interval += read
        self.sums.zero_()
        return tokens, _SquaredLengths(squares, pairs)

    def _sum_over_ranks(self, args: Namespace) -> list[float]:
        """The sums over the global batch: every data-parallel rank has its own documents, the ranks of its model the
        same ones."""
        from megatron.core import parallel_state

        copies = args.virtual_pipeline_model_parallel_size or 1
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.sums)
            copies *= (
                parallel_state.get_tensor_model_parallel_world_size()
                * parallel_state.get_pipeline_model_parallel_world_size()
                * parallel_state.get_context_parallel_world_size()
            )
        return [total / copies for total in self.sums.tolist()]

    def log(self, *args, **kwargs):
        """In place of Megatron's `training_log`, which it calls."""
        from megatron.training.global_vars import get_args

        call = self.log_signature.bind(*args, **kwargs)
        call.apply_defaults()
        given, settings = call.arguments, get_args()
        first = given["is_first_iteration"]
        due = first or given["iteration"] % settings.log_interval == 0
        if due and self.packed:
            tokens, squares, pairs = self.interval / self.interval_iterations
            given["total_real_tokens_in_batch"], given["seqlen_squared_sum_in_batch"] = (
                tokens,
                _SquaredLengths(squares, pairs),
            )
        result = self.original["training_log"](*call.args, **call.kwargs)
        if due:
            if not first:  # as Megatron, whose first log does not end an interval
                self.interval, self.interval_iterations = np.zeros(3), 0
            self._report(settings, given["iteration"])
        return result

    def _report(self, args: Namespace, iteration: int) -> None:
        if not args.log_throughput:
            return
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
        from megatron.training.utils import print_rank_last

        assert self.throughputs is not None, "Megatron's training_log no longer divides the FLOPs by the elapsed time"
        _, dense = self.throughputs
        print_rank_last(f" iteration {iteration:8d} | dense-equivalent throughput per GPU (TFLOP/s/GPU): {dense:.1f} |")
        if args.log_timers_to_tensorboard:
            writer, wandb = get_tensorboard_writer(), get_wandb_writer()
            if writer is not None:
                writer.add_scalar("throughput-dense-equivalent", dense, iteration)
            if wandb is not None:
                wandb.log({"throughput-dense-equivalent": dense}, iteration)
