"""The command line of S2-Attention, and what happens between Megatron's argument parsing and its model.

A training script needs three calls: `parse_and_validate_args(extra_args_provider=add_s2_arguments)`, then
`run = prepare_s2(args)` before it derives a model config from `args`, then `apply_s2(model_config, run)`
(layer_specs.py).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace

from s2_megatron.config.errors import shown
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.context_parallel.plan import COMM_TYPES, comm_type_of
from s2_megatron.megatron.checkpoints.compare import compare_with_checkpoint
from s2_megatron.megatron.host.cuda_on_cpu import compute_device
from s2_megatron.megatron.model.rope_scaling import refuse_dropped
from s2_megatron.megatron.patches import (
    guard_processes,
    install_checkpoint_hooks,
    install_flop_accounting,
    install_loss_log,
    install_model_check,
)
from s2_megatron.megatron.preflight.datasets import check_tokens
from s2_megatron.megatron.records.counted_targets import count_targets
from s2_megatron.megatron.records.metrics import report_missing_flags, report_run, report_s2_settings
from s2_megatron.megatron.records.position_loss import PositionLoss, measure_position_loss
from s2_megatron.megatron.records.report import (
    report_flags_without_effect,
    report_ignored_flags,
    report_tensor_parallel,
)
from s2_megatron.megatron.refusals.sparsity import refuse_layers, refuse_softmax_scale
from s2_megatron.megatron.refusals.table import refuse_unsupported, refuse_yaml_command_line
from s2_megatron.megatron.settings import DENSE_CORES, RunFlags, S2Run, S2Settings
from s2_megatron.megatron.sparsity import FROM_FLAGS, resolve_sparsity, stock_sparsity
from s2_megatron.ops.api import BACKENDS, resolve_backend
from s2_megatron.ops.checks import check_dtype, softmax_scale_of
from s2_megatron.printing import print_once


class _Config(Action):
    """--s2-config, once. Where it is given the model will be checked, so that a script without `prepare_s2` does not
    train a dense one."""

    def __call__(self, parser, namespace, values, option_string=None):
        refuse_yaml_command_line()
        install_model_check()
        before = getattr(namespace, self.dest, None)
        if before is not None:
            raise ArgumentError(
                self, f"given twice, {shown(before)} and {shown(values)}; expected one value; remove one of them"
            )
        setattr(namespace, self.dest, values)


def _token_id(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"got {shown(text)}; expected the id of a token, 0 or more; use the first answer's id")
    return int(text)


def add_s2_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the flags of S2-Attention: Megatron's `extra_args_provider`. Parsing raises ValueError when --s2-config
    stands beside --yaml-cfg, with which Megatron drops every flag."""
    group = parser.add_argument_group(title="S2-Attention")
    group.add_argument(
        "--s2-config",
        action=_Config,
        metavar="YAML",
        default=None,
        help="Sparsity of every layer (see configs/). Without it the model is Megatron's own. "
        f"{FROM_FLAGS}: that of Megatron's --window-size and --window-attn-skip-freq, without a YAML.",
    )
    group.add_argument(
        "--s2-backend",
        choices=BACKENDS,
        default="auto",
        help="What computes S2 attention: the Gluon kernels for Hopper, the portable Triton kernels or the PyTorch "
        "reference. auto: on a GPU gluon where it can compute the call and triton elsewhere, on a CPU the reference.",
    )
    group.add_argument(
        "--s2-dense-core",
        choices=DENSE_CORES,
        default="auto",
        help="What computes dense layers. stock: Megatron's core attention. s2: this package's kernels with a dense "
        "pattern. auto: stock with Transformer Engine; with the local implementation stock for short unpacked "
        "sequences, else s2.",
    )
    group.add_argument(
        "--s2-cp-comm-type",
        nargs="+",
        type=comm_type_of,
        choices=COMM_TYPES,
        default=["sparse"],
        metavar="TYPE",
        help="How context-parallel ranks exchange keys and values in the layers that S2's op computes: "
        f"{', '.join(COMM_TYPES)}; one for all layers, or one per layer. sparse: each rank receives the key blocks "
        "that its pattern attends (with packed documents for windows and sinks only). all_gather: all keys and values. "
        "a2a: the whole sequence of some heads. Megatron's own dense layers follow --cp-comm-type.",
    )
    group.add_argument(
        "--s2-cp-keep-received",
        action="store_true",
        help="Keep the keys and values that context-parallel ranks received for the backward, instead of receiving "
        "them again: faster, more memory.",
    )
    group.add_argument(
        "--s2-keep-attention-output",
        action="store_true",
        help="Under activation recomputation (full, or selective with core_attn) store the attention's output of the "
        "first pass, so that the recomputation computes no attention.",
    )
    group.add_argument(
        "--s2-allow-python-patterns",
        action="store_true",
        help="Let the YAML name Python functions as patterns (`function: module:function`); they are imported and run.",
    )
    group.add_argument(
        "--s2-allow-sparsity-change",
        action="store_true",
        help="Resume a checkpoint, optimizer included, that was trained with another sparsity.",
    )
    group.add_argument(
        "--s2-no-checksums",
        action="store_false",
        dest="s2_checksums",
        help="Make no checksums of checkpoints, and verify none. They are made in the background, beside the "
        "checkpoint's files, and verified when it is loaded. Works without --s2-config too.",
    )
    group.add_argument(
        "--s2-loss-log",
        metavar="PATH",
        default=None,
        help="Append one JSON line an iteration (iteration, exact loss, grad norm, learning rate) and one per "
        "evaluation. Works without --s2-config too.",
    )
    group.add_argument(
        "--s2-traceback",
        action="store_true",
        help="When the start of pretrain_gpt_s2.py fails, show Python's traceback instead of one error line.",
    )
    group.add_argument(
        "--s2-position-loss",
        type=int,
        metavar="N",
        default=None,
        help="Log the training and validation loss in N buckets of position in the context (for packed documents, in "
        "the document) and that of the last eighth. Works without --s2-config too.",
    )
    group.add_argument(
        "--s2-loss-from-token",
        type=_token_id,
        metavar="ID",
        default=None,
        help="Count the loss only where the token to predict has at least this id: for synthetic tasks, whose answers "
        "have ids of their own. Works without --s2-config too.",
    )
    return parser


def _apply_softmax_scale(args: Namespace, sparsity: ResolvedSparsity) -> ResolvedSparsity:
    """Writes the YAML's softmax scale where Megatron's model config reads it, or takes over the one that is already
    there."""
    refuse_softmax_scale(args, sparsity)
    if sparsity.softmax_scale is None:
        of_script = getattr(args, "softmax_scale", None)
        if of_script is not None:
            softmax_scale_of(of_script, args.kv_channels)
        return dataclasses.replace(sparsity, softmax_scale=of_script)
    # TransformerConfig has this field and no flag for it; it copies every attribute of args that has a field's name.
    args.softmax_scale = sparsity.softmax_scale
    print_once(f"S2: softmax scale {sparsity.softmax_scale:g} in every layer, dense ones included")
    return sparsity


def _check_backend(args: Namespace, run: S2Run) -> None:
    """Raises ValueError for a backend that this machine does not have, or that does not compute in the run's type."""
    device = compute_device().type
    try:
        check_dtype(resolve_backend(run.settings.backend, device), args.params_dtype, device)
    except ValueError as error:
        raise ValueError(f"--s2-backend {run.settings.backend}: {error}") from error


def _check_losses(args: Namespace, flags: RunFlags) -> None:
    """Raises ValueError for a loss by position, or from a token on, that this run cannot have."""
    if flags.position_buckets is not None:
        if args.logits_load_dir is not None:
            raise ValueError(
                "--s2-position-loss with --logits-load-dir: the loss is a teacher's; expected the language model's; "
                "leave one out"
            )
        PositionLoss(flags.position_buckets, flags.seq_length)
    first, vocabulary = flags.first_token, args.padded_vocab_size
    if first is not None and args.vocab_size is not None:
        vocabulary = args.vocab_size + 1  # with one that a tokenizer adds
    if None not in (first, vocabulary) and first >= vocabulary:
        raise ValueError(
            f"--s2-loss-from-token={first}: the vocabulary has no token above {vocabulary - 1}, and no "
            "prediction would count; expected one of its tokens; name the first token that counts"
        )
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        check_tokens(args)


def _resolve_run(args: Namespace, *, elsewhere: bool) -> S2Run:
    """What --s2-config and the other flags ask for. Raises ValueError for what cannot be honoured."""
    refuse_unsupported(args, elsewhere=elsewhere)
    refuse_dropped(args)
    run = S2Run(_apply_softmax_scale(args, resolve_sparsity(args)), S2Settings.from_args(args))
    refuse_layers(args, run)
    if not elsewhere:
        _check_backend(args, run)
    return run


def check_run(args: Namespace, *, elsewhere: bool = False) -> S2Run | None:
    """Everything that `prepare_s2` refuses; installs and reports nothing.

    args: as there; args.softmax_scale is set. elsewhere: the run is for another machine than this one, so that nothing
    is said of the GPU and the packages here. Raises ValueError as prepare_s2 does.
    """
    _check_losses(args, RunFlags.from_args(args))
    run = None if args.s2_config is None else _resolve_run(args, elsewhere=elsewhere)
    compare_with_checkpoint(args, None if run is None else run.sparsity)
    return run


def _has_flags(args: Namespace) -> bool:
    """False under --yaml-cfg, which drops them. Raises ValueError where the script does not take them, and for
    --s2-loss-from-token in a script with a loss of its own."""
    if not hasattr(args, "s2_config"):
        if getattr(args, "yaml_cfg", None) is not None:
            return False
        raise ValueError(
            "args has no s2_config; pass extra_args_provider=add_s2_arguments to Megatron's parse_and_validate_args"
        )
    if args.s2_loss_from_token is not None and "s2_megatron.megatron.data" not in sys.modules:
        raise ValueError(
            "--s2-loss-from-token: the loss of this script counts every token; expected that of "
            "s2_megatron.megatron.data; import its forward_step above prepare_s2 and give it to pretrain, or drop the "
            "flag"
        )
    return True


def _install(args: Namespace, flags: RunFlags, run: S2Run | None, sparsity: ResolvedSparsity) -> None:
    """Puts what this run needs around Megatron's training loop (patches.py)."""
    measure_position_loss(flags.position_buckets, flags.seq_length)
    count_targets(flags.masks)
    install_loss_log(flags.loss_log)
    guard_processes()
    install_model_check()
    install_checkpoint_hooks(args, None if run is None else run.sparsity)
    if run is not None or flags.log_throughput:  # so that a dense run logs what an S2 run does
        install_flop_accounting(args, sparsity)


def prepare_s2(args: Namespace) -> S2Run | None:
    """Reads --s2-config, checks that this run can honour it, and tells Megatron's accounting of it.

    args: what Megatron's `parse_and_validate_args` returned, with `add_s2_arguments` as its extra_args_provider. To be
    called before a model config is derived from `args`. Returns what `apply_s2` takes, or None without --s2-config.

    Afterwards args.s2_sparsity (canonical JSON, saved in checkpoints with the other arguments) and args.s2_density
    (attended pairs over dense causal ones) are set, and args.softmax_scale when the YAML has one; throughput counts
    attended pairs; wandb and TensorBoard know the sparsity.

    Raises ValueError for a config that does not fit the model, for every setting that S2 attention cannot honour, and
    when --load would resume a checkpoint of another sparsity.
    """
    if not _has_flags(args):
        return None
    flags, run = RunFlags.from_args(args), check_run(args)
    # With Megatron's default, True, no process with --flight-recorder-dump-path ends (torch 2.11, NCCL 2.28): at exit
    # torch dumps once more and waits. The dump at a timeout, which says who did not come, is another setting.
    args.flight_recorder_extra_dump_on_exec = False
    if run is not None:
        args.s2_sparsity, args.s2_density = run.sparsity.canonical_json(), run.sparsity.density()
    sparsity = stock_sparsity(args) if run is None else run.sparsity

    report_missing_flags(args)
    (report_ignored_flags if run is None else report_flags_without_effect)(args)
    _install(args, flags, run, sparsity)
    report_run(args, sparsity)
    if run is not None:
        report_s2_settings(args, sparsity)
        report_tensor_parallel(sparsity, args.tensor_model_parallel_size)
    return run
