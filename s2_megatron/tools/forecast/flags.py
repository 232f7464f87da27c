"""Megatron's flags that a forecast needs, by Megatron's names, with Megatron's defaults. Neither Megatron nor torch is
imported; a test compares names and defaults with Megatron's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.config.resolve import MOST_HEADS, MOST_LAYERS, MOST_SEQ_LENGTH
from s2_megatron.context_parallel.plan import COMM_TYPES

MOST_CP_RANKS = 1024
MOST_WIDTH = 2**20  # of a layer, in numbers
MOST_BATCH = 2**24

# Settings that change time or memory in ways that no row of the tables has: no forecast, for this reason.
REFUSED = {
    "--num-experts": "mixture of experts",
    "--multi-latent-attention": "multi-latent attention",
    "--mtp-num-layers": "multi-token prediction",
    "--hybrid-layer-pattern": "hybrid layer patterns",
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
    "--pipeline-model-parallel-layout": "uneven pipeline stages",
    "--decoder-first-pipeline-num-layers": "uneven pipeline stages",
    "--decoder-last-pipeline-num-layers": "uneven pipeline stages",
    "--account-for-embedding-in-pipeline-split": "uneven pipeline stages",
    "--account-for-loss-in-pipeline-split": "uneven pipeline stages",
    "--hierarchical-context-parallel-sizes": "context parallelism of several levels",
    "--yaml-cfg": "a YAML in place of flags",
}
# Of these, those that change the model's shape: no FLOPs and no KV cache in bytes, either.
OTHER_SHAPES = ("--num-experts", "--multi-latent-attention", "--mtp-num-layers", "--hybrid-layer-pattern", "--yaml-cfg")
# Settings that the forecast does not know, though it is made: it says so.
UNKNOWN = {
    "--tp-comm-overlap": "forecast without this overlap",
    "--enable-cuda-graph": "forecast without CUDA graphs",
    "--cuda-graph-impl": "forecast without CUDA graphs",
    "--distribute-saved-activations": "forecast without distributing them",
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


# flag: (default, settings of add_argument). None: Megatron works it out, or it has to be given.
_heads, _layers, _width = integer(1, MOST_HEADS), integer(1, MOST_LAYERS), integer(1, MOST_WIDTH)
_batch = integer(1, MOST_BATCH)
_switch = dict(action="store_true")
FLAGS: dict[str, tuple[object, dict]] = {
    "--num-layers": (None, dict(type=_layers)),
    "--hidden-size": (None, dict(type=_width, help="needed for FLOPs, memory and the forecast")),
    "--num-attention-heads": (None, dict(type=_heads)),
    "--group-query-attention": (False, _switch),
    "--num-query-groups": (1, dict(type=_heads, help="KV heads (default: as many as attention heads)")),
    "--kv-channels": (None, dict(type=_width, help="head dim (default: hidden size / attention heads)")),
    "--ffn-hidden-size": (None, dict(type=_width, help="default: 4 x hidden size, 8/3 x with --swiglu")),
    "--swiglu": (False, _switch),
    "--seq-length": (None, dict(type=integer(1, MOST_SEQ_LENGTH))),
    "--position-embedding-type": ("learned_absolute", {}),
    "--max-position-embeddings": (None, dict(type=integer(1, MOST_SEQ_LENGTH))),
    "--untie-embeddings-and-output-weights": (False, _switch),
    "--vocab-size": (None, dict(type=integer(1, 2**24), help="default: that of the launch line's --tokenizer-model")),
    "--tokenizer-model": (None, {}),
    "--make-vocab-size-divisible-by": (128, dict(type=_width)),
    "--mtp-num-layers": (None, dict(type=integer(0, MOST_LAYERS))),
    "--hidden-dropout": (0.1, dict(type=float)),
    "--bf16": (False, _switch),
    "--fp16": (False, _switch),
    "--micro-batch-size": (None, dict(type=_batch)),
    "--global-batch-size": (None, dict(type=_batch)),
    "--tensor-model-parallel-size": (1, dict(type=_heads)),
    "--sequence-parallel": (False, _switch),
    "--context-parallel-size": (1, dict(type=integer(1, MOST_CP_RANKS))),
    "--pipeline-model-parallel-size": (1, dict(type=_layers)),
    "--num-layers-per-virtual-pipeline-stage": (None, dict(type=_layers)),
    "--num-virtual-stages-per-pipeline-rank": (None, dict(type=_layers)),
    "--cp-comm-type": (["p2p"], dict(nargs="+")),
    "--use-distributed-optimizer": (False, _switch),
    "--overlap-grad-reduce": (False, _switch),
    "--no-gradient-accumulation-fusion": (False, _switch),
    "--no-rope-fusion": (False, _switch),
    "--cross-entropy-loss-fusion": (False, _switch),
    "--cross-entropy-fusion-impl": ("native", dict(choices=("native", "te"))),
    "--transformer-impl": ("transformer_engine", {}),
    "--recompute-granularity": (None, dict(choices=("full", "selective"))),
    "--recompute-activations": (False, _switch),
    "--recompute-method": (None, dict(choices=("uniform", "block"))),
    "--recompute-num-layers": (None, dict(type=_layers)),
    "--recompute-modules": (None, dict(nargs="+")),
    "--s2-config": (None, {}),
    "--s2-dense-core": ("auto", dict(choices=("auto", "stock", "s2"))),
    "--s2-cp-comm-type": (["sparse"], dict(nargs="+", choices=COMM_TYPES)),
    "--s2-cp-keep-received": (False, _switch),
    "--s2-keep-attention-output": (False, _switch),
    "--s2-allow-python-patterns": (False, dict(**_switch, help="import the functions that the YAML names")),
}


class _LineParser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(f"launch line: {message}")


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
    attribute, wins. The flags that FLAGS lacks are passed over.

    Raises ValueError for a value that is none.
    """
    parser = _LineParser(prog="launch line", add_help=False, allow_abbrev=False)
    add_flags(parser)
    # Of a flag without a value or a repeated list, argparse says what is wrong.
    line, _ = parser.parse_known_args(list(words))
    if words and not getattr(line, "group_query_attention", False):
        vars(line).pop("num_query_groups", None)  # Megatron passes over it, too
    read = {destination(flag): default for flag, (default, _) in FLAGS.items()}
    named = {destination(flag) for flag in FLAGS}
    for source in (line, given or argparse.Namespace()):
        read |= {name: value for name, value in vars(source).items() if name in named}
        if "num_query_groups" in vars(source):
            read["group_query_attention"] = True
    return argparse.Namespace(**read)


def reasons(words: Sequence[str], table: dict[str, str]) -> list[str]:
    """["--num-experts: mixture of experts", ...]: the flags of REFUSED or UNKNOWN that a launch line has."""
    names = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    return [f"{flag}: {reason}" for flag, reason in table.items() if flag in names]


def vocabulary(args: argparse.Namespace) -> int | None:
    """The padded vocabulary of a run, or None where neither a flag nor a tokenizer file tells it."""
    size = args.vocab_size
    if size is None and args.tokenizer_model is not None:
        file = Path(args.tokenizer_model) / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            size = Tokenizer.from_file(str(file)).get_vocab_size(with_added_tokens=True)
    if size is None:
        return None
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-size // multiple) * multiple
