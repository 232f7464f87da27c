"""Whether a checked launch line has room: in the memory of its GPUs, and on the disk of its checkpoints."""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.tools.forecast.fit import SHARE, fitting, peak_gib
from s2_megatron.tools.launch_line import LaunchLine


def gpus_here() -> tuple[int, float | None]:
    """How many GPUs this machine has, and the memory of the first in GiB; None without one."""
    import torch

    from s2_megatron.megatron.host.cuda_on_cpu import compute_device

    if compute_device().type == "cpu":
        return 0, None
    return torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory / 2**30


def memory_notes(
    line: LaunchLine, args: argparse.Namespace, sparsity: ResolvedSparsity | None, gib: float | None = None
) -> list[str]:
    """A warning where the run does not fit into its GPUs, with the flags that make it fit. args: validated, with the
    vocabulary. sparsity: None: dense. gib: of a GPU of the training; None: of this machine's."""
    gib = gib or gpus_here()[1]
    if gib is None:
        return []
    known = (args.padded_vocab_size or None, sparsity)
    try:
        found = peak_gib(line.flags, args.world_size, *known)
    except ValueError:  # Megatron has taken the line: it is the forecast that does not know it
        return []
    if found is None or found <= SHARE * gib:
        return []
    gpus, engine = args.world_size // line.nodes, args.transformer_impl == "transformer_engine"
    layout = fitting(line.flags, gpus, gib, *known, engine=engine, nodes=line.nodes)
    if layout is None:
        fix = "no layout that fits is known; take shorter sequences, or larger GPUs"
    else:
        nodes = f"on {layout.nodes} nodes" if layout.nodes > line.nodes else ""
        flags = f"add {' '.join(layout.flags)}" if layout.flags else ""
        fix = f"{' '.join(filter(None, (flags, nodes)))} (then about {layout.gib:.0f} GiB)"
    ends = "runs out of memory" if found > gib else "may run out of memory, for PyTorch reserves more"
    return [f"WARNING: the fullest GPU needs about {found:.0f} GiB and has {gib:.0f}: the run {ends}; {fix}"]


def disk_notes(args: argparse.Namespace) -> list[str]:
    """A warning where --save's disk has no room for the checkpoints that the run keeps, or for one: weights, and Adam's
    moments and fp32 copy of 16-bit weights unless --no-save-optim; by Megatron's count of parameters. args: validated,
    with the vocabulary."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    from s2_megatron.megatron.host.paths import existing, is_remote

    if args.save is None or is_remote(args.save) or not args.padded_vocab_size:
        return []
    sizes = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor", "data")
    one = dict.fromkeys((f"{kind}_parallel_size" for kind in sizes), 1) | {"world_size": 1}
    whole = argparse.Namespace(**vars(args) | one | {"use_distributed_optimizer": False})
    try:
        parameters = compute_weight_and_optimizer_memory(whole) / 18  # its bytes for each
    except (AssertionError, ArithmeticError, TypeError):  # a model that it cannot count
        return []
    half = args.bf16 or args.fp16
    needed = parameters * ((2 if half else 4) + (0 if args.no_save_optim else 12 if half else 8))
    free, save = shutil.disk_usage(existing(Path(args.save).absolute())).free, printable(args.save, 200)
    room = (
        f"WARNING: --save={save} has {free / 1e9:,.2f} GB free, and one checkpoint takes about {needed / 1e9:,.2f} GB"
    )
    if free < needed:
        return [f"{room}; free some, or name another folder"]
    every, last = args.save_interval or args.train_iters, args.train_iters
    if not last or not every or last < every:
        return []
    count, there = -(-last // every), len(list(Path(args.save).glob("iter_*")))
    if (retained := args.save_retain_interval) is not None:  # the one before goes when the next is complete
        count = min(count, last // math.lcm(every, retained) + 2)
    if free >= needed * (count - there):
        return []
    once = -(-last // every) * every
    newest = f"add --save-retain-interval {once} to keep the newest alone, which takes room for two, or "
    newest = "" if retained is not None or free < 2 * needed else newest
    return [f"{room}, and it keeps up to {count}; {newest}give a larger --save-interval, or another folder"]
