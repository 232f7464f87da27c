"""Checks a launch line before it is started: what the run will need later, each mistake as one line.

    s2-megatron check -- torchrun --nproc-per-node 8 pretrain_gpt_s2.py --s2-config configs/s2_7b_hybrid.yaml ...

The flags go through Megatron's own parser and validation; the sparsity is resolved for the model; the checkpoint that
would be loaded, the data, the tokenizer and the folders are looked at. Nothing is written or downloaded. Status 0 with
the table of layers, or status 2 with one `error:` line. It needs no GPU: on a machine without one, what depends on the
GPU and on the packages of the training machine is left out, and said so. The launchers run it before torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import warnings
from typing import NamedTuple

from s2_megatron.config.errors import printable
from s2_megatron.tools.launch_line import LaunchLine, launch_words, parse_launch_line
from s2_megatron.tools.outputs import console
from s2_megatron.tools.rules import warnings as plan_warnings

SCRIPT = "pretrain_gpt_s2.py"
VARIABLE = re.compile(r"\$[A-Za-z_{]")  # as in '--data-path $DATA_PATH', a line that no shell has read


class Checked(NamedTuple):
    """A launch line with which nothing is wrong. args: Megatron's, validated. run: what prepare_s2 would return. notes:
    what is worth knowing."""

    args: argparse.Namespace
    run: object | None
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "s2-megatron check [-h] [--record] [--s2-traceback] -- LAUNCH LINE"
    parser.add_argument(
        "--record", action="store_true", help="write a refusal into run_status.json in the folder of --save"
    )
    parser.add_argument("--s2-traceback", action="store_true", help="show where an error comes from")


def _on_this_machine(line: LaunchLine) -> tuple[int, bool]:
    """(processes of the job, whether the run is for another machine: it wants GPUs and there is none here)."""
    import torch

    from s2_megatron.megatron.cuda_on_cpu import is_installed

    devices = 0 if is_installed() or not torch.cuda.is_available() else torch.cuda.device_count()
    backend = [behind for flag, behind in zip(line.flags, line.flags[1:]) if flag == "--distributed-backend"]
    on_cpu = "--distributed-backend=gloo" in line.flags or backend[-1:] == ["gloo"]
    return line.world_size(devices or (os.cpu_count() if on_cpu else 0)), not devices and not on_cpu


def check_line(line: LaunchLine) -> Checked:
    """Everything that a start of this line checks, and its tokenizer, in this process: it sets sys.argv and the
    environment. Raises ValueError."""
    from s2_megatron.megatron.cuda_on_cpu import install_if_no_gpu, is_installed, require_cpu_settings

    if (variable := next((word for word in line.flags if VARIABLE.search(word)), None)) is not None:
        raise ValueError(
            f"launch line: {printable(variable)} is a shell's variable; expected what it stands for; write echo in "
            "front of the command in its script, and give what that prints"
        )
    world_size, elsewhere = _on_this_machine(line)
    os.environ |= {**line.environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    sys.argv = [line.script or SCRIPT, *line.flags]
    install_if_no_gpu()

    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import validate_args

    from s2_megatron.megatron.arguments import add_s2_arguments, check_run
    from s2_megatron.megatron.checkpoint import dropout_note, find_checkpoint
    from s2_megatron.megatron.preflight.files import DEFAULT_TOKENIZER
    from s2_megatron.megatron.preflight.start_up import check_before, parse
    from s2_megatron.megatron.report import NO_CONFIG

    other = os.path.basename(sys.argv[0]) != SCRIPT
    args = parse(add_s2_arguments, ignore_unknown=other)
    notes = check_before(args, elsewhere=elsewhere)
    if other:
        notes.append(f"{sys.argv[0]} is not {SCRIPT}: flags of its own are not checked")
    if args.use_checkpoint_args:
        from megatron.training.checkpointing import load_args_from_checkpoint

        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    validate_args(args, {"tokenizer_type": DEFAULT_TOKENIZER})
    if elsewhere:
        notes.append("no GPU here: what depends on the GPU and on the training machine's packages is not checked")
    elif is_installed():
        require_cpu_settings(args)
    notes += _check_tokenizer(args)
    run = check_run(args, elsewhere=elsewhere)
    checkpoint = find_checkpoint(args)
    if checkpoint is not None and (note := dropout_note(args, checkpoint)) is not None:
        notes.append(note)
    model = argparse.Namespace(**vars(args))
    model.vocab_size = args.vocab_size or 1  # of an unknown tokenizer any will do
    model.apply_rope_fusion = args.apply_rope_fusion and not elsewhere
    model_config = gpt_config_from_args(model)
    if not (elsewhere and args.use_precision_aware_optimizer):  # which asks for Transformer Engine
        pretrain_cfg_container_from_args(args, model_config)
    notes += [NO_CONFIG] if run is None else plan_warnings(run.sparsity)
    return Checked(args, run, notes)


def _check_tokenizer(args: argparse.Namespace) -> list[str]:
    """Builds the tokenizer, which gives args the size of the vocabulary. Returns a note for one of the Hugging Face hub
    that this machine has not downloaded: without a network the hub's library tries for a minute."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    from s2_megatron.megatron.preflight.files import names_hub

    if names_hub(args) and not _is_downloaded(args.tokenizer_model):
        return [
            f"--tokenizer-model={printable(args.tokenizer_model, 200)} is no folder here, so a name of the Hugging "
            "Face hub, and not in this machine's cache: neither the name nor the vocabulary is checked; load it once "
            "where there is a network (transformers.AutoTokenizer.from_pretrained), or give its folder"
        ]
    build_tokenizer(args)
    return []


def _is_downloaded(name: str) -> bool:
    """Whether a tokenizer of the hub is in this machine's cache. True where Megatron is to say what is wrong: without
    the hub's library, and for a name that no hub has."""
    try:
        from huggingface_hub import try_to_load_from_cache

        asked_for = ("config.json", "tokenizer_config.json")  # first; None: not known whether the hub has it
        return all(try_to_load_from_cache(name, file) is not None for file in asked_for)
    except (ImportError, ValueError):
        return True


def run(args: argparse.Namespace) -> int:
    """Prints the table of layers and what is worth knowing. Returns the status: 2 after an error line."""
    if not args.launch_line:
        raise ValueError(
            f"there is no launch line; expected one behind --; for example s2-megatron check -- torchrun "
            f"--nproc-per-node 8 {SCRIPT} --num-layers 32 ..."
        )
    line = parse_launch_line(launch_words(args.launch_line))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checked = check_line(line)
    except (Exception, SystemExit) as error:
        from s2_megatron.megatron.preflight.start_up import asks_help, error_text, record

        if args.s2_traceback:
            raise
        if isinstance(error, SystemExit) and not error.code and asks_help(sys.argv[1:]):
            print(printed.getvalue(), end="")
            return 0
        text = error_text(error, printed.getvalue())
        if args.record:
            record("refused", text, 2)
        print(f"error: {text}", file=sys.stderr)
        return 2
    report(checked)
    return 0


def report(checked: Checked) -> None:
    """Prints the table of layers, the notes and what the job is."""
    args = checked.args
    if checked.run is not None:
        console().print(checked.run.sparsity.table())
    for note in checked.notes:
        text = note.removeprefix("WARNING: ")
        print(f"{'note' if text == note else 'warning'}: {text}", file=sys.stderr)  # launchers show it, and no table
    sizes = {"tensor": args.tensor_model_parallel_size, "pipeline": args.pipeline_model_parallel_size}
    sizes |= {"context": args.context_parallel_size, "data": args.data_parallel_size}
    parallel = ", ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1) or "one copy of the model"
    print(f"nothing wrong found: {args.world_size} processes ({parallel}), {args.num_layers} layers")
