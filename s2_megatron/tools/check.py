"""Checks a launch line before it is started: what the run will need later, each mistake as one line.

    s2-megatron check -- torchrun --nproc-per-node 8 pretrain_gpt_s2.py --s2-config configs/s2_7b_mixed.yaml ...

The flags go through Megatron's own parser and validation; the sparsity is resolved for the model; the checkpoint that
would be loaded, the data, the tokenizer and the folders are looked at. Nothing is written or downloaded. Status 0 with
the table of layers, or status 2 with an `error:` line for each mistake. It needs no GPU: on a machine without one, what
depends on the GPU and on the packages of the training machine is left out, and said so. The launchers run it before
torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from s2_megatron.config.errors import printable
from s2_megatron.config.load import load_config
from s2_megatron.megatron.errors import CONNECTIONS
from s2_megatron.megatron.sparsity import FROM_FLAGS
from s2_megatron.printing import held
from s2_megatron.tools.forecast.tables import NAMED, memory_gib
from s2_megatron.tools.launch_line import LaunchLine, launch_words, parse_launch_line
from s2_megatron.tools.outputs import console
from s2_megatron.tools.progress import working
from s2_megatron.tools.repair import ADDED, DROPPED, RENAMED, named, repaired
from s2_megatron.tools.room import disk_notes, memory_notes
from s2_megatron.tools.rules import warnings as plan_warnings

SCRIPT = "pretrain_gpt_s2.py"
MISSING = " is not given"
MOST_ROUNDS = 30  # each finds one mistake at least
VARIABLE = re.compile(r"\$[A-Za-z_{]")  # as in '--data-path $DATA_PATH', a line that no shell has read


class Checked(NamedTuple):
    """A launch line with which nothing is wrong. args: Megatron's, validated. run: what prepare_s2 would return. notes:
    what is worth knowing."""

    args: argparse.Namespace
    run: object | None
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "s2-megatron check [-h] [--here] [--gpu GPU] [--record] [--s2-traceback] -- LAUNCH LINE"
    parser.add_argument(
        "--here", action="store_true", help="the line has to start on this machine, though it has no GPU"
    )
    parser.add_argument("--gpu", help="its memory is forecast for this one, e.g. H100 (default: this machine's)")
    parser.add_argument(
        "--record", action="store_true", help="write a refusal into run_status.json in the folder of --save"
    )
    parser.add_argument("--s2-traceback", action="store_true", help="show where an error comes from")


def _on_this_machine(line: LaunchLine, here: bool) -> tuple[int, bool]:
    """(processes of the job, whether the run is for another machine, because it needs GPUs and this one has none).
    here: it is for this one."""
    import torch

    from s2_megatron.megatron.host.cuda_on_cpu import is_installed

    devices = 0 if is_installed() or not torch.cuda.is_available() else torch.cuda.device_count()
    backend = [behind for flag, behind in zip(line.flags, line.flags[1:]) if flag == "--distributed-backend"]
    on_cpu = "--distributed-backend=gloo" in line.flags or backend[-1:] == ["gloo"]
    return line.world_size(devices or (os.cpu_count() if on_cpu else 0)), not (devices or on_cpu or here)


class Stage(NamedTuple):
    """A part of the check. run: takes a _Check, raises ValueError, or what Megatron raises. needs: the stages that have
    to be right before it."""

    run: Callable[[_Check], None]
    needs: tuple[str, ...] = ()


class _Check:
    """One look at a launch line, in this process: it sets sys.argv and the environment."""

    def __init__(self, here: bool, gpu_gib: float | None):
        self.here, self.gpu_gib, self.elsewhere, self.run = here, gpu_gib, False, None
        self.notes: list[str] = []

    def all_stages(self, line: LaunchLine) -> list[tuple[str, str, BaseException]]:
        """(name, text of the error line, error) of each stage that fails; stages that need one of those are left out.
        Raises SystemExit where the line asks for --help."""
        from s2_megatron.megatron.errors import error_text
        from s2_megatron.megatron.preflight.start_up import asks_help

        self.line = line
        self.own = os.path.basename(line.script or SCRIPT) == SCRIPT
        errors: list[tuple[str, str, BaseException]] = []
        failed: set[str] = set()
        for name, stage in STAGES.items():
            if failed.intersection(stage.needs):
                failed.add(name)
                continue
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed), held(printed), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    stage.run(self)
            except (Exception, SystemExit) as error:
                if isinstance(error, SystemExit) and not error.code and asks_help(sys.argv[1:]):
                    print(printed.getvalue(), end="")
                    raise
                failed.add(name)
                errors.append((name, error_text(error, printed.getvalue()), error))
        return errors

    def start(self) -> None:
        from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

        line = self.line
        if (variable := next((word for word in line.flags if VARIABLE.search(word)), None)) is not None:
            raise ValueError(
                f"launch line: {printable(variable)} is a shell's variable; expected what it stands for; write echo in "
                "front of the command in its script, and give what that prints"
            )
        world_size, self.elsewhere = _on_this_machine(line, self.here)
        os.environ |= {**line.environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
        sys.argv = [line.script or SCRIPT, *line.flags]
        install_if_no_gpu()

    def parse(self) -> None:
        from s2_megatron.megatron.arguments import add_s2_arguments
        from s2_megatron.megatron.preflight.start_up import parse

        self.args = parse(add_s2_arguments, ignore_unknown=not self.own)
        if not self.own:
            self.notes.append(f"{self.line.script} is not {SCRIPT}: flags of its own are not checked")

    def flags(self) -> None:
        from s2_megatron.megatron.preflight.mistakes import check_flags

        check_flags(self.args, elsewhere=self.elsewhere, own_data=self.own)

    def files(self) -> None:
        from s2_megatron.megatron.preflight.mistakes import check_written

        check_written(self.args)

    def data(self) -> None:
        from s2_megatron.megatron.preflight.datasets import check_datasets

        check_datasets(self.args, own_data=self.own)

    def yaml(self) -> None:
        if self.args.s2_config not in (None, FROM_FLAGS):  # whose windows `model` resolves
            load_config(self.args.s2_config, allow_python_patterns=True)  # none is called

    def megatron(self) -> None:
        from megatron.training.arguments import validate_args

        from s2_megatron.megatron.host.cuda_on_cpu import is_installed, require_cpu_settings
        from s2_megatron.megatron.preflight.start_up import DEFAULT_TOKENIZER

        args = self.args
        if args.use_checkpoint_args:
            from megatron.training.checkpointing import load_args_from_checkpoint

            load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            load_args_from_checkpoint(args)
        validate_args(args, {"tokenizer_type": DEFAULT_TOKENIZER})
        if self.elsewhere:
            self.notes.append(
                "no GPU here, so this line starts on another machine (on this one with --distributed-backend gloo): "
                "what depends on its GPUs and packages is not checked"
            )
        elif is_installed():
            require_cpu_settings(args)

    def tokenizer(self) -> None:
        self.notes += _check_tokenizer(self.args)

    def model(self) -> None:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        from s2_megatron.megatron.arguments import check_run
        from s2_megatron.megatron.checkpoints.compare import dropout_note, find_checkpoint
        from s2_megatron.megatron.hybrid_specs import model_config_from_args
        from s2_megatron.megatron.records.report import NO_CONFIG

        args = self.args
        self.run = check_run(args, elsewhere=self.elsewhere)
        checkpoint = find_checkpoint(args)
        if checkpoint is not None and (note := dropout_note(args, checkpoint)) is not None:
            self.notes.append(note)
        self.schedule(None if checkpoint is None or checkpoint.weights_only else checkpoint.scheduler)
        model = argparse.Namespace(**vars(args))
        model.vocab_size = args.vocab_size or 1  # of an unknown tokenizer any will do
        model.apply_rope_fusion = args.apply_rope_fusion and not self.elsewhere
        model_config = model_config_from_args(model)
        if not (self.elsewhere and args.use_precision_aware_optimizer):  # which asks for Transformer Engine
            pretrain_cfg_container_from_args(args, model_config)
        self.notes += [NO_CONFIG] if self.run is None else plan_warnings(self.run.sparsity)
        self.notes += disk_notes(args) + memory_notes(self.line, args, self.run and self.run.sparsity, self.gpu_gib)

    def schedule(self, resumed: dict | None) -> None:
        from megatron.core import num_microbatches_calculator as batches
        from megatron.training.global_vars import set_args, unset_global_variables

        from s2_megatron.megatron.preflight.schedule import check_schedule

        args = self.args
        sizes = dict(global_batch_size=args.global_batch_size, micro_batch_size=args.micro_batch_size)
        sizes |= dict(decrease_batch_size_if_needed=args.decrease_batch_size_if_needed, seq_length=args.seq_length)
        ranks = args.data_parallel_size * args.gtp_weight_remat_size
        steps = args.step_batch_size_schedule
        set_args(args)
        try:
            batches.init_num_microbatches_calculator(
                args.rank, data_parallel_size=ranks, step_batch_size_schedule=steps, **sizes
            )
            check_schedule(args, resumed)
        finally:
            batches.unset_num_microbatches_calculator()
            unset_global_variables()


STAGES = {
    "start": Stage(_Check.start),
    "parse": Stage(_Check.parse, ("start",)),
    "flags": Stage(_Check.flags, ("parse",)),
    "files": Stage(_Check.files, ("parse",)),
    "data": Stage(_Check.data, ("parse",)),
    "yaml": Stage(_Check.yaml, ("parse",)),
    "megatron": Stage(_Check.megatron, ("flags",)),
    "tokenizer": Stage(_Check.tokenizer, ("files", "megatron")),
    "model": Stage(_Check.model, ("data", "yaml", "tokenizer")),
}


class Mistakes(ValueError):
    """What is wrong with a launch line: texts of error lines, one for each mistake. The first is its cause."""

    def __init__(self, texts: list[str]):
        self.texts = tuple(texts)
        super().__init__("\n".join(texts))


def check_line(line: LaunchLine, *, here: bool = False, gpu_gib: float | None = None) -> Checked:
    """Everything that a start of this line checks, and its tokenizer. here: the line has to start on this machine.
    gpu_gib: memory of a GPU of the training; None: of this machine's. Raises Mistakes; SystemExit where the line asks
    for --help."""
    texts: list[str] = []
    first: BaseException | None = None
    touched: set[str] = set()  # flags of mistakes that were found, and of what was done about them
    done: dict[str, set[str]] = {stage: set() for stage in STAGES}  # what was done to the line
    for _ in range(MOST_ROUNDS):
        check = _Check(here, gpu_gib)
        errors = check.all_stages(line)
        if not errors and not texts:
            return Checked(check.args, check.run, check.notes)
        flags = line.flags
        for stage, text, error in errors:
            first = first or error
            # An error that an earlier repair caused is no mistake of the line. Where a stage combines several values we
            # cannot tell which it is, so there no error counts after a repair other than a renaming; but no flag that
            # was added makes an environment wrong.
            follows = named(text) & touched or (MISSING in text and DROPPED in done[stage])
            harmless = {RENAMED, ADDED} if CONNECTIONS in text else {RENAMED}
            unclear = stage in ("megatron", "tokenizer", "model") and set().union(*done.values()) - harmless
            if text not in texts and not follows and not unclear:
                texts.append(text)
            repair = repaired(flags, text)
            flags = repair.flags
            touched |= repair.touched
            done[stage] |= {repair.kind} if repair.kind else set()
        if flags == line.flags:
            break
        line = replace(line, flags=flags)
    raise Mistakes(texts) from first


def _check_tokenizer(args: argparse.Namespace) -> list[str]:
    """Builds the tokenizer, which gives args the size of the vocabulary. Returns a note for one of the Hugging Face hub
    that this machine has not downloaded: without a network the hub's library tries for a minute."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    model = args.tokenizer_model
    names_hub = (
        model is not None
        and args.tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer")
        and not Path(model).exists()
        and model.count("/") <= 1
        and not model.startswith(("/", ".", "~"))
    )
    if names_hub and not _is_downloaded(args.tokenizer_model):
        return [
            f"--tokenizer-model={printable(args.tokenizer_model, 200)} is not a folder here, so it is a name of the "
            "Hugging Face hub, and it is not in this machine's cache: neither the name nor the vocabulary is checked; "
            "load it once where there is a network (transformers.AutoTokenizer.from_pretrained), or give its folder"
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
    gib = None if args.gpu is None else memory_gib(args.gpu)
    if args.gpu is not None and gib is None:
        raise ValueError(f"--gpu {printable(args.gpu)}: its memory is not known; expected one of {', '.join(NAMED)}")
    try:
        with working("checking the launch line"):
            checked = check_line(line, here=args.here, gpu_gib=gib)
    except SystemExit:  # --help
        return 0
    except Mistakes as mistakes:
        from s2_megatron.megatron.preflight.start_up import save_folder
        from s2_megatron.megatron.records.status import write_status

        if args.s2_traceback:
            raise mistakes.__cause__ from None
        if args.record:
            more = f" (and {len(mistakes.texts) - 1} more)" if len(mistakes.texts) > 1 else ""
            write_status(save_folder(sys.argv[1:]), "refused", " ".join(mistakes.texts[0].split()) + more, status=2)
        for text in mistakes.texts:
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
