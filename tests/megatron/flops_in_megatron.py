"""FLOP counts of Megatron's patched functions, as JSON: a script for test_flops.py, because it patches `torch.cuda` and
Megatron.

argv: a JSON list of objects with `task` and the task's own keys. Prints `result: <JSON list>` on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace

from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

install_if_no_gpu()

import torch  # noqa: E402
from megatron.training import global_vars, training  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from s2_megatron.megatron.patches import install_flop_accounting  # noqa: E402
from s2_megatron.megatron.sparsity import resolve_sparsity  # noqa: E402
from tests.megatron.arguments import parse  # noqa: E402

LOGGED: list[dict] = []

# A script that took the function by name before it was patched, as Megatron's pretrain_gpt.py does.
USERS_SCRIPT = Namespace(update_seqlen_stats_from_cu_seqlens=training.update_seqlen_stats_from_cu_seqlens)
sys.modules["a_users_script"] = USERS_SCRIPT


def recording_training_log(
    loss_dict,
    total_loss_dict,
    iteration,
    is_first_iteration=False,
    seqlen_squared_sum_in_batch=None,
    total_real_tokens_in_batch=None,
):
    """What Megatron's training_log does with the FLOPs, without the rest."""
    args = global_vars.get_args()
    if iteration % args.log_interval == 0 or is_first_iteration:
        count = training.num_floating_point_operations(
            args,
            4,
            seqlen_squared_sum_in_batch=seqlen_squared_sum_in_batch,
            total_real_tokens_in_batch=total_real_tokens_in_batch,
        )
        LOGGED.append({"iteration": iteration, "flops": float(count), "throughput": count / 2.0})


training.training_log = recording_training_log


class HostSyncs(TorchFunctionMode):
    """Counts the calls that wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        waits = (
            torch.Tensor.tolist,
            torch.Tensor.item,
            torch.Tensor.cpu,
            torch.Tensor.__bool__,
            torch.Tensor.__int__,
            torch.Tensor.__float__,
            torch.Tensor.nonzero,
            torch.Tensor.numpy,
        )
        self.count += function in waits
        return function(*args, **(kwargs or {}))


def prepared(argv, **changes):
    args, refused = parse(argv)
    assert refused is None, refused
    for name, value in changes.items():
        setattr(args, name, value)
    args.padded_vocab_size = 512
    return args, resolve_sparsity(args)


def formula(argvs: list[list[str]]) -> list[dict]:
    """[{stock, counted, dense}]: Megatron's own count and ours of a global batch of 3 sequences."""
    stock = training.num_floating_point_operations
    result = []
    for argv in argvs:
        args, sparsity = prepared(argv)
        before = float(stock(args, 3))
        install_flop_accounting(args, sparsity)
        counted = training.num_floating_point_operations(args, 3)
        result.append(
            {"stock": before, "counted": float(counted), "dense": counted.dense, "kv_channels": args.kv_channels}
        )
    return result


def packed(argv: list[str], iterations: list[list[list[list[int]]]], settings: dict) -> dict:
    """A training loop over packed batches. iterations: [iteration][data-parallel rank][micro-batch] -> lengths of its
    documents."""
    LOGGED.clear()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args, sparsity = prepared(argv, **settings)
    global_vars.set_args(args)
    data_parallel_rank = rank // args.tensor_model_parallel_size
    if world > 1:
        from megatron.core import parallel_state

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_model_parallel_size)
    install_flop_accounting(args, sparsity)
    first_patch = training.consume_seqlen_stats_in_iteration
    accounting = install_flop_accounting(args, sparsity)
    assert training.consume_seqlen_stats_in_iteration is first_patch

    so_far, per_iteration = 0.0, []
    stages = args.virtual_pipeline_model_parallel_size or 1
    with HostSyncs() as syncs:
        for iteration, batches in enumerate(iterations):
            args.curr_iteration = iteration
            for lengths in batches[data_parallel_rank]:
                borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                for _ in range(stages):
                    USERS_SCRIPT.update_seqlen_stats_from_cu_seqlens(borders)
            tokens, squares = training.consume_seqlen_stats_in_iteration()
            count = training.num_floating_point_operations(args, 4, squares, tokens)
            per_iteration.append(
                [None if tokens is None else float(tokens), None if squares is None else float(squares), float(count)]
            )
            so_far += count
            training.training_log(
                {},
                {},
                iteration + 1,
                is_first_iteration=iteration == 0,
                seqlen_squared_sum_in_batch=squares,
                total_real_tokens_in_batch=tokens,
            )
            with torch.no_grad():  # an evaluation is not counted
                USERS_SCRIPT.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 100], dtype=torch.int32))
    return {
        "per_iteration": per_iteration,
        "so_far": so_far,
        "logged": list(LOGGED),
        "syncs": syncs.count,
        "throughputs": accounting.throughputs,
    }


def timing(argv: list[str]) -> float:
    """Seconds of computing to install the accounting at the length of argv."""
    args, sparsity = prepared(argv)
    begin = time.process_time()
    install_flop_accounting(args, sparsity)
    return time.process_time() - begin


def main() -> None:
    tasks = {"formula": formula, "packed": packed, "timing": timing}
    results = [tasks[request.pop("task")](**request) for request in json.loads(sys.argv[1])]
    if os.environ.get("RANK", "0") == "0":
        print("result:", json.dumps(results))


if __name__ == "__main__":
    main()
