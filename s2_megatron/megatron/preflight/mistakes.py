"""Flags that Megatron takes, and with which a training computes something else without a word, or fails after its first
steps, at the first evaluation or checkpoint; folders that cannot be written. What Megatron says before the second
iteration is not said here, unless its words are about something else.

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
from s2_megatron.megatron.host.paths import check_writable, is_remote
from s2_megatron.megatron.preflight.datasets import DEFAULT_SPLIT, split_shares
from s2_megatron.megatron.preflight.values import Mistake, check_values, flag_of, refuse_first


def _has_part(args: Namespace, part: int) -> bool:
    """Whether there is data to validate with (1), or to test with (2)."""
    own = (args.train_data_path, args.valid_data_path, args.test_data_path)
    in_file = bool(args.per_split_data_args_path)
    shares = split_shares(args.split or DEFAULT_SPLIT)
    return in_file or bool(own[part] if any(own) else shares[part:] and shares[part])


def _sources(args: Namespace) -> dict[str, bool]:
    """Of each flag that names a checkpoint to load: whether one may be there. What lies in other storage, or in folders
    of the nodes, is not known."""
    of_nodes = args.non_persistent_ckpt_type is not None
    given = [("--load", args.load, args.ckpt_step), ("--pretrained-checkpoint", args.pretrained_checkpoint, None)]
    return {
        flag: is_remote(folder) or checkpoint_to_load(Path(folder), setting=flag, step=step) is not None or of_nodes
        for flag, folder, step in given
        if folder
    }


# Intervals at which Megatron writes tensors into the folder of --save.
WRITTEN_INTERVALS = tuple(f"save_{what}_interval" for what in ("params", "activations", "wgrads", "dgrads"))

MISTAKES: dict[str, Mistake] = {
    "no data to validate with": Mistake(
        lambda args: bool(args.eval_iters or args.full_validation) and not _has_part(args, 1),
        "no validation data, but --eval-iters={eval_iters} (Megatron's default is 100) or --full-validation evaluates, "
        "at the latest when the training ends; expected data, or no evaluation; use --eval-iters 0 without "
        "--full-validation, or give the second part of --split (or --valid-data-path) some data",
        own_data=True,
    ),
    "no eval_interval": Mistake(
        lambda args: args.eval_interval is None and not (args.full_validation or args.skip_train),
        "--eval-interval is not given: Megatron counts the validation data by it, also with --eval-iters 0; expected "
        "one; add --eval-interval 1000",
    ),
    "no tokenizer": Mistake(
        lambda args: args.tokenizer_type is None and args.vocab_file is None and not args.use_checkpoint_args,
        "--tokenizer-type is not given: pretrain_gpt_s2.py takes GPT2BPETokenizer then, with --vocab-file and "
        "--merge-file; expected a tokenizer; add --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER",
        own_data=True,
    ),
    **{
        name: Mistake(
            lambda args, name=name: getattr(args, name) and not args.multiple_validation_sets,
            f"{flag_of(name)} without --multiple-validation-sets: Megatron fails at the first evaluation; expected "
            "both; add --multiple-validation-sets, which takes a single set, too",
        )
        for name in ("full_validation", "validation_set_names")
    },
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
        "--use-persistent-ckpt-worker with --non-persistent-ckpt-type local: the first local checkpoint fails, for "
        "the model's tensors cannot be handed to that worker; expected one of the two; leave "
        "--use-persistent-ckpt-worker and --async-save out",
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
        lambda args: args.perform_initialization is False and not (args.skip_train or any(_sources(args).values())),
        "--no-initialization without a checkpoint to load: the weights would be what the memory holds; expected one; "
        "leave --no-initialization out, or add --load FOLDER",
        own_data=True,
    ),
    "init_model_with_meta_device": Mistake(
        lambda args: (
            args.init_model_with_meta_device
            and not (args.use_megatron_fsdp or args.skip_train or any(_sources(args).values()))
        ),
        "--init-model-with-meta-device without a checkpoint to load and without --use-megatron-fsdp: the weights would "
        "be what the memory holds; expected one of the two; leave the flag out, or add --load FOLDER",
        own_data=True,
    ),
    "stages of one process": Mistake(  # Megatron speaks of an interleaved schedule
        lambda args: "|" in (args.hybrid_layer_pattern or "") and args.pipeline_model_parallel_size == 1,
        "--hybrid-layer-pattern={hybrid_layer_pattern}: a | is where a pipeline stage ends, and "
        "--pipeline-model-parallel-size is 1; expected no | in one stage; leave each | out, or give "
        "--pipeline-model-parallel-size as many stages as the pattern has",
    ),
    "rampup_batch_size": Mistake(
        lambda args: args.rampup_batch_size is not None,
        "--rampup-batch-size={rampup_batch_size}: this Megatron ignores it; expected another flag; use "
        "--step-batch-size-schedule, whose help shows its form",
    ),
}


# Packages that are missing here, for which Megatron asks after its first steps.
MISSING = tuple(
    Mistake(
        lambda args, name=name: getattr(args, name) is not None and find_spec("transformer_engine") is None,
        f"{flag_of(name)}={{{name}}}: Transformer Engine is not installed, and Megatron looks for its layers; expected "
        "it; pip install 'transformer-engine[pytorch]', or leave the flag out",
    )
    for name in ("save_activations_interval", "save_dgrads_interval")
)


def check_load(args: Namespace) -> None:
    """Raises ValueError where a run is told to load, and there is nothing to load: Megatron would begin with random
    weights, and say so in the middle of its log. --load may be empty where --save is the same folder."""
    found = _sources(args)
    names = ("finetune", "exit_on_missing_checkpoint", "use_checkpoint_args")
    needing = next((flag_of(name) for name in names if getattr(args, name)), None)
    if needing and not found:
        raise ValueError(f"{needing} without --load: there is nothing to load; expected one; add --load FOLDER")
    flag, folder, to_come = "--pretrained-checkpoint", args.pretrained_checkpoint, False
    if flag not in found:
        flag, folder, known = "--load", args.load, None not in (args.load, args.save)
        known = known and not needing and "\0" not in folder + args.save
        to_come = known and os.path.realpath(folder) == os.path.realpath(args.save)
    if not found.get(flag, True) and not to_come:
        inside = re.fullmatch(r"iter_0*(\d+)", Path(folder).absolute().name)
        fix = f"give its parent and --ckpt-step {inside[1]}" if inside else f"name the folder that has {TRACKER}"
        also = "" if needing or flag != "--load" else ", and it is not the folder of --save"
        raise ValueError(
            f"{f'{needing} with ' if needing else ''}{flag}={printable(folder, 200)}: no checkpoint there{also}; "
            f"expected a checkpoint, for the run would begin with random weights; {fix}, or leave {needing or flag} out"
        )


# Folders that are written, by the argument's name; of files, the folder that holds them.
WRITTEN_FOLDERS = (
    "save", "tensorboard_dir", "wandb_save_dir", "data_cache_path", "flight_recorder_dump_path",
    "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir",
)  # fmt: skip
WRITTEN_FILES = ("s2_loss_log",)


def check_written(args: Namespace) -> None:
    """Raises ValueError for a folder that cannot be made or written, for a file where a folder belongs, and for a path
    without a character, which Megatron takes for none. Nothing is written. Other storage (s3://) is not looked at."""
    for name in (*WRITTEN_FOLDERS, *WRITTEN_FILES, "load", "pretrained_checkpoint"):
        value, flag = getattr(args, name, None), flag_of(name)
        if value == "":
            raise ValueError(f"{flag} is empty (an unset variable?); expected a path; set it, or leave the flag out")
        if value and not is_remote(str(value)) and name in WRITTEN_FOLDERS + WRITTEN_FILES:
            check_writable(f"{flag}={printable(value, 200)}", value, is_file=name in WRITTEN_FILES)


def check_flags(args: Namespace, *, elsewhere: bool = False, own_data: bool = True) -> None:
    """Everything of values.py and of this module, but for folders that are written. elsewhere: another machine than
    this one trains. own_data: the datasets are those of pretrain_gpt_s2.py. Raises ValueError."""
    check_values(args)
    refuse_first(args, (mistake for mistake in MISTAKES.values() if own_data or not mistake.own_data))
    refuse_first(args, () if elsewhere else MISSING)
    check_load(args)
