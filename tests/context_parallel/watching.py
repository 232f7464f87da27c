"""What the ranks of tests compare and watch: results, what torch's collectives are given, transfers that come late."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist

from s2_megatron.context_parallel.exchange import Pending


def difference(mine, truth, scale_of=None):
    """max |a - b| / max |b|, b of the whole sequence."""
    return ((mine - truth).abs().max() / (truth if scale_of is None else scale_of).abs().max()).item()


@contextmanager
def handed_over():
    """[[bytes of the tensor sent, bytes of the tensor received]] of every collective that torch is given while the
    context is open."""
    seen = []

    def watched(collective):
        def call(received, sent, *args, **kwargs):
            seen.append([sent.numel() * sent.itemsize, received.numel() * received.itemsize])
            return collective(received, sent, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("all_to_all_single", "all_gather_into_tensor"):
            stack.enter_context(patch.object(dist, name, watched(getattr(dist, name))))
        yield seen


@contextmanager
def arrives_late():
    """Every transfer happens when its result is asked for, as late as it may, and what is received is NaN before."""

    def start(pending, received, held, work):
        pending.received, pending.late = received.fill_(float("nan")), work

    def result(pending):
        pending.late()
        return pending.received

    with patch.object(Pending, "__init__", start), patch.object(Pending, "result", result):
        yield
