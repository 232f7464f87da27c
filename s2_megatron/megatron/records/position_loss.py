"""The loss by position in the context: `--s2-position-loss N`.

A sparse pattern costs late positions first if it costs anything, and a mean over all positions hides that. Every
microbatch adds its losses to N buckets of equal length and to the last eighth of the context ("trailing"); once an
iteration the sums are added over the data- and context-parallel ranks. The buckets' losses, weighted by their numbers
of tokens, give Megatron's `lm loss` (but for the validation loss of --sft, which Megatron averages over microbatches
with equal weights). Of packed documents the position is the one in the document.

Shapes: t tokens of a microbatch on this rank.
"""

from __future__ import annotations

from itertools import pairwise

import torch

TRAILING_SHARE = 8  # the trailing loss is that of the last 1/8 of the context
TRAIN, EVALUATE = 0, 1


def packed_positions(borders: torch.Tensor, tokens: int) -> torch.Tensor:
    """The position of every token in its document, int64 [tokens].

    borders: int32 [documents + 1], the documents with their padding. Tokens after the last border count from there on.
    Computed on the device of `borders`, without waiting for it.
    """
    places = torch.arange(tokens, device=borders.device)
    return places - borders.long()[torch.searchsorted(borders.long(), places, right=True) - 1]


class PositionLoss:
    """Sums of losses and numbers of tokens by position, on the device of the losses.

    buckets: 1 to seq_length. seq_length: tokens of the context, over all context-parallel ranks. Raises ValueError for
    another number of buckets.
    """

    def __init__(self, buckets: int, seq_length: int):
        if not 1 <= buckets <= seq_length:
            raise ValueError(
                f"--s2-position-loss {buckets} with --seq-length {seq_length}; expected 1 to {seq_length}; use 16"
            )
        self.buckets, self.seq_length = buckets, seq_length
        edges = [-(-index * seq_length // buckets) for index in range(buckets + 1)]
        digits = len(str(seq_length - 1))
        self.names = [f"{first:0{digits}}-{end - 1:0{digits}}" for first, end in pairwise(edges)] + ["trailing"]
        self.trailing_start = seq_length - seq_length // TRAILING_SHARE
        # fp64 [buckets + 1, 2]: loss, tokens; training, evaluation. Never replaced: a CUDA graph of whole iterations
        # adds to the tensors that it was captured with.
        self.sums: list[torch.Tensor | None] = [None, None]

    def add(self, losses: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> None:
        """Adds one microbatch; does not wait for the device.

        losses, mask: [t] of any shape, mask 0 where a token does not count. positions: int64, as many.
        """
        kind = TRAIN if torch.is_grad_enabled() else EVALUATE
        if self.sums[kind] is None:
            self.sums[kind] = torch.zeros(self.buckets + 1, 2, dtype=torch.float64, device=losses.device)
        weights = mask.detach().reshape(-1).double()
        rows = torch.stack([losses.detach().reshape(-1).double() * weights, weights], dim=1)
        positions = positions.reshape(-1)
        self.sums[kind].index_add_(0, positions * self.buckets // self.seq_length, rows)
        self.sums[kind][-1] += (rows * (positions >= self.trailing_start).unsqueeze(1)).sum(dim=0)

    def read(self, kind: int, group=None) -> dict[str, tuple[float, float]]:
        """{bucket: (mean loss, number of tokens)} of what was added since the last reading, of every bucket with
        tokens; the trailing one last. {} on a rank that added nothing: one without the last pipeline stage.

        kind: TRAIN or EVALUATE. group: the ranks that share the batch, all of which must call.
        """
        if self.sums[kind] is None:
            return {}
        sums = self.sums[kind].clone()
        self.sums[kind].zero_()
        if group is not None:
            torch.distributed.all_reduce(sums, group=group)
        return {name: (loss / tokens, tokens) for name, (loss, tokens) in zip(self.names, sums.tolist()) if tokens > 0}


_current: PositionLoss | None = None


def measure_position_loss(buckets: int | None, seq_length: int) -> PositionLoss | None:
    """Has the loss function of data.py add up losses by position in this process; None for buckets=None: not at all.

    Raises ValueError as PositionLoss does.
    """
    global _current
    _current = None if buckets is None else PositionLoss(buckets, seq_length)
    return _current


def position_loss() -> PositionLoss | None:
    """What the loss function adds to; None where the loss by position is not wanted."""
    return _current
