"""Flags that Megatron takes and then fails on with a traceback, or trains nothing with.

Each function takes Megatron's arguments as its parser leaves them, before they are validated, and raises ValueError for
the first thing that is wrong.
"""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.megatron.checkpoints.folder import TRACKER, checkpoint_to_load
from s2_megatron.megatron.preflight.combinations import check_combinations
from s2_megatron.megatron.preflight.schedule import check_batches, check_schedule
from s2_megatron.megatron.preflight.values import check_values, flag_of

# Flags without which Megatron fails, some of them only when the model is built -> an example. A checkpoint may bring
# those of the model (--use-checkpoint-args).
REQUIRED_OF_MODEL = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
}
REQUIRED = {**REQUIRED_OF_MODEL, "micro_batch_size": 1, "lr": 3e-4, "eval_interval": 1000}


def check_required(args: Namespace) -> None:
    """Raises ValueError for a flag that is missing."""
    if args.train_iters is None and args.train_samples is None:
        raise ValueError("--train-iters is not given; expected how long to train; add --train-iters 1000")
    if args.save is not None and args.save_interval is None:
        raise ValueError("--save without --save-interval; expected both; add --save-interval 1000")
    if args.save is not None and args.non_persistent_save_interval and args.non_persistent_ckpt_type is None:
        raise ValueError(
            "--non-persistent-save-interval without --non-persistent-ckpt-type: Megatron fails at the first of these "
            "checkpoints; expected both; add --non-persistent-ckpt-type local or global, or leave the interval out"
        )
    if args.phase_transition_iterations and args.train_samples is None:
        raise ValueError(
            f"--phase-transition-iterations={printable(args.phase_transition_iterations)} without --train-samples: "
            "Megatron counts the samples of a phase (training/training.py:4491); expected both; give --train-samples "
            "in place of --train-iters"
        )
    for name, example in REQUIRED.items():
        stored = args.use_checkpoint_args and name in REQUIRED_OF_MODEL
        unused = args.skip_train and name == "lr"
        if getattr(args, name) is None and not (stored or unused):
            raise ValueError(f"{flag_of(name)} is not given; expected a value; add {flag_of(name)} {example}")


def check_settings(args: Namespace) -> None:
    """Raises ValueError for single settings and pairs that cannot work."""
    if args.attention_backend.name == "local":
        raise ValueError(
            "--attention-backend=local: Megatron takes it only with --spec local, which brings its own layers; "
            "expected another backend; for Megatron's local layers use --transformer-impl local"
        )
    if args.wandb_project and not args.wandb_exp_name:
        raise ValueError(
            f"--wandb-project={printable(args.wandb_project)} without a name of the run; expected both; add "
            "--wandb-exp-name NAME"
        )
    if args.wandb_project and find_spec("wandb") is None:
        raise ValueError(
            f"--wandb-project={printable(args.wandb_project)}: wandb is not installed; expected it; pip install wandb, "
            "or leave the flag out"
        )
    if args.vocab_size is not None:
        check_first_token(getattr(args, "s2_loss_from_token", None), args.vocab_size + 1)


def check_first_token(first: int | None, vocabulary: int) -> None:
    """Raises ValueError when the loss would count no token. first: --s2-loss-from-token. vocabulary: how many tokens
    there may be, with one that a tokenizer adds to --vocab-size, or with the padding."""
    if first is not None and first >= vocabulary:
        raise ValueError(
            f"--s2-loss-from-token={first}: the vocabulary has no token above {vocabulary - 1}, and no prediction "
            "would count; expected one of its tokens; name the first token that counts"
        )


def _check_product(sizes: dict[str, int], world_size: int, what: str, also: int = 1, more: str = "") -> None:
    """Raises ValueError when the product of the sizes, by their flags, does not divide the number of processes. also:
    what has to divide it, too. more: another remedy."""
    product = math.prod(sizes.values())
    if world_size % product:
        used = " x ".join(f"{flag}={size}" for flag, size in sizes.items() if size > 1)
        fitting = math.lcm(product, also)
        raise ValueError(
            f"{used}: {what} on {product} processes, and the job has {world_size}; expected a number of processes "
            f"that {product} divides; start {-(-world_size // fitting) * fitting}, or lower one of these{more}"
        )


def check_world(args: Namespace) -> None:
    """Raises ValueError when the model-parallel sizes, or those of the experts, do not divide the number of
    processes."""
    if args.use_checkpoint_args and args.use_mp_args_from_checkpoint_args:
        return  # the sizes are in the checkpoint
    tensor, pipeline = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    sizes = {tensor: args.tensor_model_parallel_size, pipeline: args.pipeline_model_parallel_size}
    model = sizes | {"--context-parallel-size": args.context_parallel_size}
    _check_product(model, args.world_size, "a model")
    # Tensor parallelism cuts experts, too, unless they have a size of their own. Context-parallel ranks hold different
    # experts (megatron/core/parallel_state.py, initialize_model_parallel).
    uncut = args.world_size % (sizes[pipeline] * args.expert_model_parallel_size) == 0
    more = ", or add --expert-tensor-parallel-size 1" if sizes[tensor] > 1 and uncut else ""
    if args.expert_tensor_parallel_size is not None:
        sizes["--expert-tensor-parallel-size"], more = args.expert_tensor_parallel_size, ""
        del sizes[tensor]
    sizes["--expert-model-parallel-size"] = args.expert_model_parallel_size
    _check_product(sizes, args.world_size, "experts", math.prod(model.values()), more)


def check_checkpoint_flags(args: Namespace) -> None:
    """Raises ValueError where a run is told to load, and there is nothing to load: Megatron would begin with random
    weights, and say so in the middle of its log."""
    source = args.pretrained_checkpoint
    if source is not None and checkpoint_to_load(Path(source), setting="--pretrained-checkpoint") is None:
        raise ValueError(
            f"--pretrained-checkpoint={printable(source, 200)}: no checkpoint there; expected a folder with one; name "
            "the folder that has latest_checkpointed_iteration.txt"
        )
    needing = [
        flag for flag in ("finetune", "exit_on_missing_checkpoint", "use_checkpoint_args") if getattr(args, flag)
    ]
    if not needing or source is not None:
        _check_load(args, source is None)
        return
    flag = flag_of(needing[0])
    if args.load is None:
        raise ValueError(f"{flag} without --load: there is nothing to load; expected a checkpoint; add --load FOLDER")
    found = checkpoint_to_load(Path(args.load), step=args.ckpt_step)
    if found is None and args.non_persistent_ckpt_type is None:
        raise ValueError(
            f"{flag} with --load={printable(args.load, 200)}: no checkpoint there; expected one; name the folder that "
            f"has latest_checkpointed_iteration.txt, or leave {flag} out"
        )


def _check_load(args: Namespace, needed: bool) -> None:
    """--load without a checkpoint is the first start of a run that will save there, or a wrong path. needed: the
    weights come from nowhere else."""
    if args.load is None or "://" in args.load or args.non_persistent_ckpt_type is not None:
        return
    folder = Path(args.load)
    if (
        args.save is not None
        and "\0" not in args.load + args.save
        and os.path.realpath(folder) == os.path.realpath(args.save)
    ):
        return
    if checkpoint_to_load(folder, step=args.ckpt_step) is None and needed:
        folder = folder.absolute()
        inside = re.fullmatch(r"iter_0*(\d+)", folder.name)
        fix = f"give its parent and --ckpt-step {inside[1]}" if inside else "name the folder that has " + TRACKER
        raise ValueError(
            f"--load={printable(args.load, 200)}: no checkpoint there, and it is not the folder of --save; expected a "
            f"checkpoint, for the run would begin with random weights; {fix}, or leave --load out"
        )


def check_flags(args: Namespace, *, elsewhere: bool = False) -> None:
    """Everything of this module, values.py, schedule.py and combinations.py. elsewhere: another machine than this one
    trains. Raises ValueError."""
    check_values(args)
    check_required(args)
    check_settings(args)
    check_world(args)
    check_batches(args)
    check_schedule(args)
    check_combinations(args, elsewhere=elsewhere)
    check_checkpoint_flags(args)
