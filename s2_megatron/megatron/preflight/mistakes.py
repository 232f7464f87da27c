"""Flags that Megatron takes, and with which a training computes something else without a word, or fails after its first
steps, at the first evaluation or checkpoint. What Megatron says before the first step is not said here.

A new one is an entry of MISTAKES; tests/tools/bad_launches.py needs a launch that makes it.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.megatron.checkpoints.folder import TRACKER, checkpoint_to_load
from s2_megatron.megatron.host.paths import is_remote
from s2_megatron.megatron.preflight.datasets import DEFAULT_SPLIT, split_shares
from s2_megatron.megatron.preflight.values import Mistake, check_values, flag_of, refuse_first


def _has_part(args: Namespace, part: int) -> bool:
    """Whether there is data to validate with (1), or to test with (2)."""
    own = (args.train_data_path, args.valid_data_path, args.test_data_path)
    if args.per_split_data_args_path:
        return True  # the lists are in a file
    if any(own):
        return bool(own[part])
    return bool(split_shares(args.split or DEFAULT_SPLIT)[part:] and split_shares(args.split or DEFAULT_SPLIT)[part])


def _loads_nothing(args: Namespace) -> bool:
    """Whether a training begins with the weights that its model was built with."""
    if args.skip_train or args.non_persistent_ckpt_type is not None:
        return False  # the latter may lie in the nodes' own folders
    given = [("--load", args.load, args.ckpt_step), ("--pretrained-checkpoint", args.pretrained_checkpoint, None)]
    return not any(
        folder and (is_remote(folder) or checkpoint_to_load(Path(folder), setting=flag, step=step))
        for flag, folder, step in given
    )


# Intervals at which Megatron writes tensors into the folder of --save.
WRITTEN_INTERVALS = (
    "save_params_interval",
    "save_activations_interval",
    "save_wgrads_interval",
    "save_dgrads_interval",
)

MISTAKES: dict[str, Mistake] = {
    "no data to validate with": Mistake(
        lambda args: bool(args.eval_iters or args.full_validation) and not _has_part(args, 1),
        "no validation data, and --eval-iters={eval_iters} (Megatron's default is 100) or --full-validation asks for "
        "it, at the end of the training at the latest; expected both or none; use --eval-iters 0 without "
        "--full-validation, or give the second part of --split (or --valid-data-path) some data",
        own_data=True,
    ),
    "no tokenizer": Mistake(
        lambda args: args.tokenizer_type is None and args.vocab_file is None and not args.use_checkpoint_args,
        "--tokenizer-type is not given: pretrain_gpt_s2.py takes GPT2BPETokenizer then, with --vocab-file and "
        "--merge-file; expected a tokenizer; add --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER",
        own_data=True,
    ),
    "full_validation": Mistake(
        lambda args: args.full_validation and not args.multiple_validation_sets,
        "--full-validation without --multiple-validation-sets: Megatron fails at the first evaluation; expected both; "
        "add --multiple-validation-sets, which takes a single set, too",
    ),
    "validation_set_names": Mistake(
        lambda args: bool(args.validation_set_names) and not args.multiple_validation_sets,
        "--validation-set-names without --multiple-validation-sets: Megatron fails at the first evaluation; expected "
        "both; add that, and --full-validation, or leave the names out",
    ),
    "multiple_validation_sets and a test set": Mistake(
        lambda args: args.multiple_validation_sets and args.full_validation and _has_part(args, 2),
        "--multiple-validation-sets with a test set: Megatron evaluates that as if it were several; expected none; "
        "give the third part of --split a 0, and no --test-data-path",
    ),
    "non_persistent_save_interval": Mistake(
        lambda args: args.save and args.non_persistent_save_interval and args.non_persistent_ckpt_type is None,
        "--non-persistent-save-interval without --non-persistent-ckpt-type: Megatron fails at the first of these "
        "checkpoints; expected both; add --non-persistent-ckpt-type local or global, or leave the interval out",
    ),
    "use_persistent_ckpt_worker": Mistake(
        lambda args: args.use_persistent_ckpt_worker and args.non_persistent_ckpt_type == "local",
        "--use-persistent-ckpt-worker with --non-persistent-ckpt-type local: the model's tensors cannot be handed to "
        "that worker, and the first local checkpoint fails; expected one of the two; leave "
        "--use-persistent-ckpt-worker out (--async-save may stay)",
    ),
    **{
        f"{name} without a folder": Mistake(
            lambda args, name=name: getattr(args, name) is not None and args.save is None,
            f"{flag_of(name)}={{{name}}} without --save: the tensors are written there; expected both; add "
            "--save FOLDER --save-interval 1000",
        )
        for name in WRITTEN_INTERVALS
    },
    "perform_initialization": Mistake(
        lambda args: args.perform_initialization is False and _loads_nothing(args),
        "--no-initialization without a checkpoint to load: the weights would be what the memory holds; expected one; "
        "leave --no-initialization out, or add --load with the folder of a checkpoint",
        own_data=True,
    ),
    "init_model_with_meta_device": Mistake(
        lambda args: args.init_model_with_meta_device and not args.use_megatron_fsdp and _loads_nothing(args),
        "--init-model-with-meta-device without a checkpoint to load and without --use-megatron-fsdp: the weights would "
        "be what the memory holds; expected one of the two; leave --init-model-with-meta-device out, or add --load "
        "with the folder of a checkpoint",
        own_data=True,
    ),
    "rampup_batch_size": Mistake(
        lambda args: args.rampup_batch_size is not None,
        "--rampup-batch-size={rampup_batch_size}: this Megatron ignores it; expected another flag; use "
        "--step-batch-size-schedule, whose help shows its form",
    ),
}


def check_machine(args: Namespace) -> None:
    """Raises ValueError for a package that is missing here, for which Megatron asks after its first steps."""
    for name in ("save_activations_interval", "save_dgrads_interval"):
        if getattr(args, name, None) is not None and find_spec("transformer_engine") is None:
            raise ValueError(
                f"{flag_of(name)}={getattr(args, name)}: Transformer Engine is not installed, and Megatron looks for "
                "its layers; expected it; pip install 'transformer-engine[pytorch]', or leave the flag out"
            )


def check_load(args: Namespace) -> None:
    """Raises ValueError where a run is told to load, and there is nothing to load: Megatron would begin with random
    weights, and say so in the middle of its log. --load may be empty where --save is the same folder."""
    needing = [
        name for name in ("finetune", "exit_on_missing_checkpoint", "use_checkpoint_args") if getattr(args, name)
    ]
    of_nodes = args.non_persistent_ckpt_type is not None  # in folders of their own
    if (source := args.pretrained_checkpoint) is not None:
        if not is_remote(source) and checkpoint_to_load(Path(source), setting="--pretrained-checkpoint") is None:
            raise ValueError(
                f"--pretrained-checkpoint={printable(source, 200)}: no checkpoint there; expected one; name the folder "
                f"that has {TRACKER}"
            )
    elif needing and args.load is None:
        raise ValueError(
            f"{flag_of(needing[0])} without --load: there is nothing to load; expected a checkpoint; add --load FOLDER"
        )
    if args.load is None or is_remote(args.load):
        return
    found = checkpoint_to_load(Path(args.load), step=args.ckpt_step)
    nul = "\0" in f"{args.load}{args.save}"
    to_come = args.save is not None and not nul and os.path.realpath(args.load) == os.path.realpath(args.save)
    if found is None and source is None and not of_nodes and (needing or not to_come):
        inside = re.fullmatch(r"iter_0*(\d+)", Path(args.load).absolute().name)
        fix = f"give its parent and --ckpt-step {inside[1]}" if inside else f"name the folder that has {TRACKER}"
        what = f"{flag_of(needing[0])} with " if needing else ""
        also = "" if needing else ", and it is not the folder of --save"
        raise ValueError(
            f"{what}--load={printable(args.load, 200)}: no checkpoint there{also}; expected a checkpoint, for the run "
            f"would begin with random weights; {fix}, or leave {flag_of(needing[0]) if needing else '--load'} out"
        )


def check_first_token(first: int | None, vocabulary: int) -> None:
    """Raises ValueError when the loss would count no token. first: --s2-loss-from-token. vocabulary: how many tokens
    there may be, with one that a tokenizer adds to --vocab-size, or with the padding."""
    if first is not None and first >= vocabulary:
        raise ValueError(
            f"--s2-loss-from-token={first}: the vocabulary has no token above {vocabulary - 1}, and no prediction "
            "would count; expected one of its tokens; name the first token that counts"
        )


def check_flags(args: Namespace, *, elsewhere: bool = False, own_data: bool = True) -> None:
    """Everything of this module and of values.py. elsewhere: another machine than this one trains. own_data: the
    datasets are those of pretrain_gpt_s2.py. Raises ValueError."""
    check_values(args)
    refuse_first(args, (mistake for mistake in MISTAKES.values() if own_data or not mistake.own_data))
    if not elsewhere:
        check_machine(args)
    if args.vocab_size is not None:
        check_first_token(getattr(args, "s2_loss_from_token", None), args.vocab_size + 1)
    check_load(args)
