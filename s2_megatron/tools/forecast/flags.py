"""Megatron's flags that a forecast needs, by Megatron's names, with Megatron's defaults, and the values that a training
refuses. Neither Megatron nor torch is imported, unless a line has Megatron's windows; a test compares names, defaults,
types and choices with Megatron's own parser."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.context_parallel.plan import COMM_TYPES, comm_type_of
from s2_megatron.megatron.preflight.values import NUMBERS, RANGES, Mistake, check_values, flag_of, refuse_first
from s2_megatron.megatron.sparsity import layer_symbols

UNEVEN = "uneven pipeline stages"
# Settings that change time or memory in ways that no row of the tables has: no forecast, for this reason.
REFUSED = {
    "--num-experts": "mixture of experts",
    "--multi-latent-attention": "multi-latent attention",
    "--mtp-num-layers": "multi-token prediction",
    "--fp8-format": "FP8",
    "--fp4-format": "FP4",
    "--use-megatron-fsdp": "FSDP",
    "--use-torch-fsdp2": "FSDP",
    "--optimizer-cpu-offload": "an optimizer on the host",
    "--use-precision-aware-optimizer": "optimizer states of other precisions",
    "--fine-grained-activation-offloading": "activations on the host",
    "--cpu-offloading-num-layers": "activations on the host",
    "--sft": "packed documents, whose work depends on their lengths",
    "--dataloader-inter-document-masking": "packed documents, whose work depends on their lengths",
    "--pipeline-model-parallel-layout": UNEVEN,
    "--decoder-first-pipeline-num-layers": UNEVEN,
    "--decoder-last-pipeline-num-layers": UNEVEN,
    "--account-for-embedding-in-pipeline-split": UNEVEN,
    "--account-for-loss-in-pipeline-split": UNEVEN,
    "--hierarchical-context-parallel-sizes": "context parallelism of several levels",
    "--yaml-cfg": "a YAML in place of flags",
}
# Of these, those that change the model's shape: no FLOPs and no KV cache in bytes, either.
OTHER_SHAPES = ("--num-experts", "--multi-latent-attention", "--mtp-num-layers", "--yaml-cfg")
# Settings that the forecast does not know, though it is made: it says so.
UNKNOWN = {
    "--tp-comm-overlap": "forecast without this overlap",
    "--enable-cuda-graph": "forecast without CUDA graphs",
    "--cuda-graph-impl": "forecast without CUDA graphs",
    "--distribute-saved-activations": "forecast without distributing them",
}


def tuple_type(text: str) -> tuple[int, ...]:
    """Megatron's type of this name."""
    return _megatrons_type("tuple_type")(text)


def moe_freq_type(text: str) -> int | list:
    """Megatron's type of this name."""
    return _megatrons_type("moe_freq_type")(text)


def _megatrons_type(name: str):
    """The one import of Megatron: nobody else knows what lists and rules its window flags take."""
    logging.disable(logging.WARNING)  # Megatron's imports report every package that is not installed
    try:
        with warnings.catch_warnings(action="ignore"):
            from megatron.training import arguments

            return getattr(arguments, name)
    except ImportError as error:
        raise argparse.ArgumentTypeError(
            f"Megatron's windows are read by megatron-core, which cannot be imported here ({error}); install it, or "
            "name a YAML with `window:`"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


# flag: (default, settings of add_argument). None: Megatron works it out, or it has to be given.
_whole, _switch = dict(type=int), dict(action="store_true")
FLAGS: dict[str, tuple[object, dict]] = {
    "--num-layers": (None, _whole),
    "--hidden-size": (None, dict(**_whole, help="needed for FLOPs, memory and the forecast")),
    "--num-attention-heads": (None, _whole),
    "--group-query-attention": (False, _switch),
    "--num-query-groups": (1, dict(**_whole, help="KV heads (default: as many as attention heads)")),
    "--kv-channels": (None, dict(**_whole, help="head dim (default: hidden size / attention heads)")),
    "--ffn-hidden-size": (None, dict(**_whole, help="default: 4 x hidden size, 8/3 x with --swiglu")),
    "--swiglu": (False, _switch),
    "--seq-length": (None, _whole),
    "--position-embedding-type": (
        "learned_absolute",
        dict(choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none")),
    ),
    "--max-position-embeddings": (None, _whole),
    "--untie-embeddings-and-output-weights": (False, _switch),
    "--vocab-size": (None, dict(**_whole, help="default: that of the launch line's --tokenizer-model")),
    "--tokenizer-model": (None, {}),
    "--padded-vocab-size": (None, dict(**_whole, help="default: what the vocabulary is padded to")),
    "--make-vocab-size-divisible-by": (128, _whole),
    "--mtp-num-layers": (None, _whole),
    "--hybrid-layer-pattern": (None, {}),
    "--num-experts": (None, _whole),
    "--moe-ffn-hidden-size": (None, _whole),
    "--moe-router-topk": (2, _whole),
    "--moe-shared-expert-intermediate-size": (None, _whole),
    "--moe-latent-size": (None, _whole),
    "--mamba-state-dim": (128, _whole),
    "--mamba-head-dim": (64, _whole),
    "--mamba-num-groups": (8, _whole),
    "--mamba-num-heads": (None, _whole),
    "--linear-conv-kernel-dim": (4, _whole),
    "--linear-key-head-dim": (128, _whole),
    "--linear-value-head-dim": (128, _whole),
    "--linear-num-key-heads": (16, _whole),
    "--linear-num-value-heads": (32, _whole),
    "--hidden-dropout": (0.1, dict(type=float)),
    "--bf16": (False, _switch),
    "--fp16": (False, _switch),
    "--micro-batch-size": (None, _whole),
    "--global-batch-size": (None, _whole),
    "--tensor-model-parallel-size": (1, _whole),
    "--sequence-parallel": (False, _switch),
    "--context-parallel-size": (1, _whole),
    "--pipeline-model-parallel-size": (1, _whole),
    "--expert-model-parallel-size": (1, _whole),
    "--expert-tensor-parallel-size": (None, _whole),
    "--num-layers-per-virtual-pipeline-stage": (None, _whole),
    "--num-virtual-stages-per-pipeline-rank": (None, _whole),
    "--cp-comm-type": (["p2p"], dict(nargs="+")),
    "--use-distributed-optimizer": (False, _switch),
    "--overlap-grad-reduce": (False, _switch),
    "--no-gradient-accumulation-fusion": (False, _switch),
    "--no-rope-fusion": (False, _switch),
    "--cross-entropy-loss-fusion": (False, _switch),
    "--cross-entropy-fusion-impl": ("native", dict(choices=("native", "te"))),
    "--transformer-impl": (
        "transformer_engine",
        dict(choices=("local", "transformer_engine", "inference_optimized")),
    ),
    "--recompute-granularity": (None, dict(choices=("full", "selective"))),
    "--recompute-activations": (False, _switch),
    "--recompute-method": (None, dict(choices=("uniform", "block"))),
    "--recompute-num-layers": (None, _whole),
    "--recompute-modules": (None, dict(nargs="+")),
    "--window-size": (None, dict(type=tuple_type)),
    "--window-attn-skip-freq": (None, dict(type=moe_freq_type)),
    "--s2-config": (None, {}),
    "--s2-dense-core": ("auto", dict(choices=("auto", "stock", "s2"))),
    "--s2-cp-comm-type": (["sparse"], dict(nargs="+", type=comm_type_of, choices=COMM_TYPES)),
    "--s2-cp-keep-received": (False, _switch),
    "--s2-keep-attention-output": (False, _switch),
    "--s2-allow-python-patterns": (False, dict(**_switch, help="import the functions that the YAML names")),
}
# More flags of a launch line that are read because a training may refuse their values.
CHECKED: dict[str, dict] = {
    **{flag_of(name): _whole for name in RANGES if name != "moe_layer_freq"},  # which may be a list of Python's
    **{flag_of(name): dict(type=float) for name in NUMBERS},
    "--attention-dropout": dict(type=float),
    "--normalization": dict(choices=("LayerNorm", "RMSNorm")),
    "--softmax-type": dict(choices=("vanilla", "off-by-one", "learnable")),
    "--attention-backend": dict(choices=("flash", "fused", "unfused", "local", "auto")),
    "--fp8-format": dict(choices=("e4m3", "hybrid")),
    "--fp4-format": dict(choices=("e2m1",)),
    "--cuda-graph-impl": dict(choices=("none", "local", "transformer_engine", "full_iteration")),
    "--mrope-section": dict(nargs="+", **_whole),
    "--hierarchical-context-parallel-sizes": dict(nargs="+", **_whole),
    "--multi-latent-attention": _switch,
    "--heterogeneous-layers-config-path": {},
    "--heterogeneous-layers-config-encoded-json": {},
    "--decoder-first-pipeline-num-layers": _whole,
    "--decoder-last-pipeline-num-layers": _whole,
    "--account-for-embedding-in-pipeline-split": _switch,
    "--account-for-loss-in-pipeline-split": _switch,
    "--use-checkpoint-args": _switch,
    "--skip-train": _switch,
}
CHECKED = {flag: settings for flag, settings in CHECKED.items() if flag not in FLAGS}


# Of --recompute-modules.
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
EXCHANGES = ("p2p", "a2a", "all_gather", "a2a+p2p")  # of --cp-comm-type


def _is_selective(args: argparse.Namespace) -> bool:
    return bool(args.recompute_activations) or args.recompute_granularity == "selective"


# What a forecast cannot count, because no training does it: Megatron refuses it in its own words.
MEGATRONS: dict[str, Mistake] = {
    "recompute_modules": Mistake(
        lambda args: _is_selective(args) and not set(args.recompute_modules or ()) <= set(MODULES),
        f"--recompute-modules={{recompute_modules}}: no such part of a layer; expected some of {', '.join(MODULES)}; "
        "use --recompute-modules core_attn",
    ),
    "cross_entropy_fusion_impl": Mistake(
        lambda args: args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te",
        "--cross-entropy-fusion-impl=te with --cross-entropy-loss-fusion: Megatron 0.19.2 refuses it as unstable; "
        "expected its own; use --cross-entropy-fusion-impl native",
    ),
    "fp16 and bf16": Mistake(
        lambda args: args.fp16 and args.bf16,
        "--fp16 with --bf16: two precisions; expected one; leave --fp16 out",
    ),
    "full recomputation without a method": Mistake(
        lambda args: (
            args.recompute_granularity == "full" and not args.recompute_activations and args.recompute_method is None
        ),
        "--recompute-granularity=full without --recompute-method, which says which layers; expected both; add "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "cp_comm_type": Mistake(
        lambda args: (args.context_parallel_size or 1) > 1 and not set(args.cp_comm_type or ()) <= set(EXCHANGES),
        "--cp-comm-type={cp_comm_type}: Transformer Engine knows no such exchange for dense layers (S2's take "
        f"--s2-cp-comm-type); expected {', '.join(EXCHANGES)}; use --cp-comm-type p2p",
    ),
}


def integer(least: int, most: int):
    """An argument's type: integers from least to most."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {printable(text)}; expected an integer, {least} to {most}")
        return value

    return parse


class _LineParser(argparse.ArgumentParser):
    def error(self, message: str):
        what = printable(message.removeprefix("argument "), 400)
        raise ValueError(f"launch line: {what}; expected what pretrain_gpt_s2.py --help says")


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, skipped: Sequence[str] = ()) -> None:
    """Adds FLAGS to a parser; those that are not given leave no attribute."""
    for flag, (_, settings) in FLAGS.items():
        if flag not in skipped:
            parser.add_argument(flag, default=argparse.SUPPRESS, **settings)


def destination(flag: str) -> str:
    """The attribute of a flag."""
    return flag[2:].replace("-", "_")


def read_flags(words: Sequence[str], given: argparse.Namespace | None = None) -> argparse.Namespace:
    """What a launch line's flags say, with Megatron's defaults where they say nothing; `given`, where it has an
    attribute, wins. Flags of CHECKED have an attribute if the line has them; all others are passed over.

    Raises ValueError for words that are not numbers or choices. check_line tells whether a training takes the values.
    """
    parser = _LineParser(prog="launch line", add_help=False, allow_abbrev=False)
    add_flags(parser)
    for flag, settings in CHECKED.items():
        parser.add_argument(flag, default=argparse.SUPPRESS, **settings)
    # Of a flag without a value or a repeated list, argparse says what is wrong.
    line, _ = parser.parse_known_args(list(words))
    if words and not getattr(line, "group_query_attention", False):
        vars(line).pop("num_query_groups", None)  # Megatron passes over it, too
    read = {destination(flag): default for flag, (default, _) in FLAGS.items()}
    before = vars(given or argparse.Namespace())
    given = argparse.Namespace(**{name: value for name, value in before.items() if name in read})
    if "num_layers" in vars(given):
        _fit_layer_lists(line, given.num_layers)
    for name in _replaced(line, given):
        vars(line).pop(name, None)
    for source in (line, given):
        read |= vars(source)
        if "num_query_groups" in vars(source):
            read["group_query_attention"] = True
    if (pattern := read["hybrid_layer_pattern"]) is not None:  # Megatron counts, too
        read["num_layers"] = len(layer_symbols(pattern))
        read["mtp_num_layers"] = pattern.count("/") or read["mtp_num_layers"]
    return argparse.Namespace(**read)


def _fit_layer_lists(line: argparse.Namespace, layers: int) -> None:
    """Changes flags that have a word for each layer of the line's model to fit a model of another depth: to one word
    where all are equal, else to the default."""
    for name in ("cp_comm_type", "s2_cp_comm_type"):
        words = getattr(line, name, ())
        if len(words) in (0, 1, layers):
            continue
        if len(set(words)) == 1:
            setattr(line, name, words[:1])
        else:
            delattr(line, name)


def _replaced(line: argparse.Namespace, given: argparse.Namespace) -> set[str]:
    """Names of the launch line's flags to drop, because they contradict flags that were given before the `--`."""
    names, gone = set(vars(given)), set()
    if names & {"bf16", "fp16"}:
        gone |= {"bf16", "fp16"}
    if names & {"recompute_granularity", "recompute_activations"}:
        gone |= {"recompute_granularity", "recompute_activations"}
        if getattr(given, "recompute_granularity", None) != "full":
            gone |= {"recompute_method", "recompute_num_layers"}
    if "seq_length" in names and getattr(line, "max_position_embeddings", given.seq_length) < given.seq_length:
        gone.add("max_position_embeddings")
    if "context_parallel_size" in names:
        gone.add("hierarchical_context_parallel_sizes")
    stages = {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"}
    if names & stages or getattr(given, "pipeline_model_parallel_size", None) == 1:
        gone |= stages
    return gone


def check_line(args: argparse.Namespace) -> None:
    """Raises ValueError for values that a training refuses, as it does. args: of read_flags."""
    check_values(args)
    refuse_first(args, MEGATRONS.values())


def reasons(words: Sequence[str], table: dict[str, str]) -> list[str]:
    """["--num-experts: mixture of experts", ...]: the flags of REFUSED or UNKNOWN that a launch line has."""
    names = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    return [f"{flag}: {reason}" for flag, reason in table.items() if flag in names]


def vocabulary(args: argparse.Namespace) -> int | None:
    """The padded vocabulary of a run, or None where neither a flag nor a tokenizer file tells it. Raises ValueError for
    such a file that cannot be read."""
    if args.padded_vocab_size is not None:  # Megatron takes it as it is
        return args.padded_vocab_size
    size = args.vocab_size
    if size is None and args.tokenizer_model is not None:
        file = Path(args.tokenizer_model) / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            try:
                size = Tokenizer.from_file(str(file)).get_vocab_size(with_added_tokens=True)
            except Exception as error:  # tokenizers raises nothing narrower
                raise ValueError(
                    f"--tokenizer-model {printable(args.tokenizer_model, 200)}: tokenizer.json cannot be read "
                    f"({printable(error)}); expected a Hugging Face tokenizer; mend it, or give --vocab-size instead"
                ) from error
    if size is None:
        return None
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-size // multiple) * multiple
