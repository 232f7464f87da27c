"""s2-megatron export-hf: a Megatron checkpoint becomes a Hugging Face folder.

    s2-megatron export-hf --load runs/7b/checkpoints --output 7b-hf
    s2-megatron export-hf --load runs/windows/checkpoints --output windows-hf --stock

The folder has safetensors, the config with every layer's sparsity (model type s2_gpt: `import s2_megatron.huggingface`
before AutoModelForCausalLM), the tokenizer and the generation config. Any parallel layout is read; one tensor is in
memory at a time. --stock: where every layer is dense or has one exact window, the folder is that of an architecture
which transformers, vLLM and others have, and runs there without this package.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from s2_megatron.config.errors import printable
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.checkpoints.checksums import files_of_rank, read_checksums
from s2_megatron.megatron.checkpoints.translation import pattern_of
from s2_megatron.tools.hf import require_transformers
from s2_megatron.tools.hf.folders import complete_folder
from s2_megatron.tools.hf.safetensors_files import SafetensorsWriter, TensorShape
from s2_megatron.tools.hf.torch_dist import TorchDistReader, iteration_folder
from s2_megatron.tools.hf.weights import LAYERS, Piece, Shape, megatron_shapes, name_in_gpt, pieces, stored_name

MTP = ("mtp.",)  # how Megatron names the weights of multi-token prediction
DENSE_WARNING = (
    "warning: --as-dense: the folder calls itself {family}, and every engine will attend everything with it; {sparse} "
    "of {layers} layers were trained with less, so its outputs differ from the trained model's"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", type=Path, required=True, help="Megatron's checkpoint folder (torch_dist)")
    parser.add_argument("--output", type=Path, required=True, help="the folder to make; it must not exist")
    parser.add_argument(
        "--s2-config", type=Path, help="the YAML it was trained with: needed for block masks, else compared"
    )
    parser.add_argument(
        "--tokenizer",
        help="Hugging Face tokenizer, a folder or a name (default: the one in the checkpoint's arguments)",
    )
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest safetensors file (default: 5)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--stock", action="store_true",
        help="a folder that runs without this package: Llama, Ministral, Qwen2 or Qwen3 with the model's windows, or, "
        "with experts, Qwen3-MoE, Mellum or Mixtral",
    )  # fmt: skip
    form.add_argument(
        "--as-dense", action="store_true", help="a plain Llama or Qwen folder, in which the sparsity is lost"
    )


def run(args: argparse.Namespace) -> int:
    if not args.max_shard_gb > 0:
        raise ValueError(f"--max-shard-gb {args.max_shard_gb:g}: expected more than 0, e.g. 5")
    require_transformers()
    from s2_megatron.tools.hf.architecture import shape_of_arguments, sparsity_of_arguments
    from s2_megatron.tools.hf.checkpoint_model import checkpoint_arguments

    folder = iteration_folder(args.load)
    if args.output.exists():
        raise ValueError(
            f"--output {args.output} exists and is never overwritten; name another folder, or move it away"
        )
    files = len(files_of_rank(folder, 0, 1))
    print(f"{len(read_checksums(folder))} of the {files} files of {folder} are verified by their checksums")
    trained = checkpoint_arguments(folder)
    tokenizer = _tokenizer(args.tokenizer, trained)
    words = None if tokenizer is None else len(tokenizer)
    shape = shape_of_arguments(trained, f"--load {folder}", words, drop_mtp=True)
    sparsity = sparsity_of_arguments(trained, shape, args.s2_config)
    reader = TorchDistReader(folder, stored_name if pattern_of(trained) is None else name_in_gpt)
    mtp = getattr(trained, "mtp_num_layers", None) or 0
    _check_tensors(reader, shape, left_out=MTP if mtp else ())
    config = _config(args, trained, shape, sparsity, reader.dtypes["embedding.word_embeddings.weight"])
    if tokenizer is not None:
        config |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if mtp:
        print(
            f"note: what --mtp-num-layers {mtp} trained is left out; exported models have none of it", file=sys.stderr
        )
    if args.as_dense:
        _warn_dense(config, sparsity)
    shape = replace(shape, mixtral=config["model_type"] == "mixtral")
    with complete_folder(args.output, "--output") as work:
        size = write_weights(reader, shape, work, int(args.max_shard_gb * 1e9))
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_generation_config(work, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
    print(
        f"wrote {args.output}: {config['model_type']}, {size / 1e9:.2f} GB, "
        f"{1 if args.as_dense else sparsity.density():.1%} of dense attention"
    )
    return 0


def _config(
    args: argparse.Namespace, trained: argparse.Namespace, shape: Shape, sparsity: ResolvedSparsity, dtype: torch.dtype
) -> dict:
    """The content of config.json, in the form that the flags ask for."""
    from s2_megatron.tools.hf.architecture import hf_config, plain_config
    from s2_megatron.tools.hf.stock import plan_windows, stock_config

    name = str(dtype).removeprefix("torch.")
    if not args.stock and not args.as_dense:
        return hf_config(trained, shape, sparsity, name)
    windows = plan_windows(sparsity) if args.stock else (None,) * shape.num_layers
    flag = "--stock" if args.stock else "--as-dense"
    return stock_config(plain_config(trained, shape, name), shape, sparsity.softmax_scale, windows, flag)


def _tokenizer(given: str | None, trained: argparse.Namespace):
    """The tokenizer to write, or None; says so when there is none."""
    name = given
    if name is None and trained.tokenizer_type == "HuggingFaceTokenizer":
        name = trained.tokenizer_model
    if name is None:
        print(
            "note: no tokenizer is written, because the model was trained with tokenizer type "
            f"{trained.tokenizer_type}; expected HuggingFaceTokenizer; add one with --tokenizer FOLDER"
        )
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever the libraries raise for files that are no tokenizer
        source = "--tokenizer" if given else "the checkpoint's --tokenizer-model"
        reason = printable(" ".join(str(error).split()), 160)
        raise ValueError(
            f"{source} {printable(name, 200)}: no tokenizer can be loaded ({reason}); give a folder: --tokenizer FOLDER"
        ) from error


def _check_tensors(reader: TorchDistReader, shape: Shape, left_out: tuple[str, ...]) -> None:
    """Raises ValueError for weights that the exported model would not have, or lacks. left_out: how the names of those
    begin that it shall not have."""
    stored = {name: size for name, size in reader.shapes.items() if not name.startswith(left_out)}
    expected = megatron_shapes(shape, stacked=not any(name.startswith(f"{LAYERS}0.") for name in stored))
    problems = [f"{name} {list(stored[name])} is unknown" for name in stored if name not in expected]
    problems += [f"{name} is missing" for name in expected if name not in stored]
    problems += [
        f"{name} has shape {list(stored[name])}, expected {list(size)}"
        for name, size in expected.items()
        if name in stored and stored[name] != size
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{reader.folder}: the weights are not those of a Llama- or Qwen-shaped model: "
            f"{'; '.join(problems[:3])}{more}"
            "; only such models can be exported"
        )


def read_piece(reader: TorchDistReader, piece: Piece) -> torch.Tensor:
    """The rows of a piece, from stacked layers or from layers of their own."""
    name, places = piece.name, () if piece.expert is None else (piece.expert,)
    if LAYERS + name in reader.shapes:
        name, places = LAYERS + name, (piece.layer, *places)
    elif piece.layer is not None:
        name = f"{LAYERS}{piece.layer}.{name}"
    first, size = (piece.first, *(0 for _ in piece.shape[1:])), (*(1 for _ in places), *piece.shape)
    return reader.read(name, (*places, *first), size)[(0,) * len(places)]


def _dtype(reader: TorchDistReader, piece: Piece) -> torch.dtype:
    for name in (piece.name, LAYERS + piece.name, f"{LAYERS}{piece.layer}.{piece.name}"):
        if name in reader.dtypes:
            return reader.dtypes[name]
    raise AssertionError(piece.name)


def write_weights(reader: TorchDistReader, shape: Shape, output: Path, largest_file: int) -> int:
    """All weights as safetensors, in their own dtypes; the bytes written."""
    from rich.progress import track

    announced = [TensorShape(name, size, _dtype(reader, piece)) for piece in pieces(shape) for name, size in piece.hf]
    writer = SafetensorsWriter(output, announced, largest_file)
    for piece in track(list(pieces(shape)), "exporting", disable=not sys.stdout.isatty()):
        for (name, _), tensor in zip(piece.hf, piece.split(read_piece(reader, piece))):
            writer.add(name, tensor)
    writer.finish()
    return writer.nbytes


def _write_generation_config(folder: Path, config: dict) -> None:
    from transformers import GenerationConfig

    tokens = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if tokens["pad_token_id"] is None:
        tokens["pad_token_id"] = tokens["eos_token_id"]
    GenerationConfig(**tokens).save_pretrained(folder)


def _warn_dense(config: dict, sparsity: ResolvedSparsity) -> None:
    sparse = sum(layer.pattern is not None for layer in sparsity.layers)
    if sparse:
        layers = len(sparsity.layers)
        print(DENSE_WARNING.format(family=config["model_type"], sparse=sparse, layers=layers), file=sys.stderr)
