"""s2-megatron import-hf: a Llama-, Qwen- or Mistral-type folder, also with experts (Qwen3-MoE, Mixtral, Mellum), or one
that export-hf wrote, becomes a Megatron checkpoint, from which pretraining with S2-Attention continues.

    s2-megatron import-hf --input Llama-3.1-8B --output llama-megatron
    llama-megatron/train.sh --data-path data/text --s2-config configs/s2_7b_mixed.yaml --save runs/sparse

One tensor is in memory at a time. Then the logits of a short text are compared with transformers' (the whole model, or
the first layers that fit into half of the free memory). A whole launch line is printed; train.sh is this line. The
windows of a model's layers become windows.yaml, which the line gives as --s2-config.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from s2_megatron.config.errors import printable
from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.config.stored import MODEL_TYPE
from s2_megatron.tools.hf import require_transformers
from s2_megatron.tools.hf.config_keys import ROUTER_LOSS, WINDOW_KEYS
from s2_megatron.tools.hf.folders import complete_folder, refuse_existing
from s2_megatron.tools.hf.launch_text import (
    PLAN,
    SCRIPT,
    TOKENIZER,
    gpus_of,
    launch_script,
    launch_text,
    launch_words,
    layout_of,
    plan_flag,
)
from s2_megatron.tools.hf.safetensors_files import SafetensorsFolder
from s2_megatron.tools.hf.source_windows import plan_data, plan_text, source_windows
from s2_megatron.tools.hf.torch_dist import TorchDistWriter
from s2_megatron.tools.hf.weights import BEFORE_EXPERTS, EXPERTS, LAYERS, Shape, megatron_shapes, pieces
from s2_megatron.tools.inputs import read_json_object

# Modules whose empty _extra_state Megatron asks for in every layer, and norms for which Transformer Engine does.
_ATTENTION, _OF_EXPERTS = ("self_attention.linear_proj", "self_attention.linear_qkv"), ("linear_fc1", "linear_fc2")
_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")  # of models that have them
_OFFSETS = "self_attention.core_attention"  # the same of models with learnable softmax offsets
_FINAL_NORM = "decoder.final_layernorm"
_ROPE_BUFFER = "rotary_emb.inv_freq"  # old folders carry it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, help="the Hugging Face folder (safetensors)")
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint folder to make; it must not exist")
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, metavar="N",
        help="as in Megatron, times the tensor-parallel size of the training (default: 128)",
    )  # fmt: skip
    parser.add_argument(
        "--train-on", metavar="8xH100",
        help="the GPUs of each node that trains, which train.sh is written for (default: this machine's)",
    )  # fmt: skip
    parser.add_argument(
        "--no-logit-check", action="store_true",
        help="do not compare the logits of the imported model with those of transformers",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    require_transformers()
    from s2_megatron.tools.hf.architecture import config_as_read, megatron_flags, shape_of_config, sparsity_of_config

    divisor = args.make_vocab_size_divisible_by
    if divisor < 1:
        raise ValueError(f"--make-vocab-size-divisible-by {divisor}: expected 1 or more, e.g. 128")
    refuse_existing(args.output, "--output")
    gpus = gpus_of(args.train_on)
    where = f"--input {args.input}"
    given = _config(args.input)
    content = config_as_read(given, where)
    shape, sparsity = shape_of_config(content, divisor), sparsity_of_config(content, where)
    if shape.padded_vocab_size > 2 * max(shape.vocab_size, 1024):
        raise ValueError(
            f"--make-vocab-size-divisible-by {divisor}: {shape.padded_vocab_size} rows for {shape.vocab_size} words; "
            "expected a number that does not double them, e.g. 128"
        )
    generation = args.input / "generation_config.json"
    if not args.no_logit_check and generation.exists():  # transformers reads it, too
        read_json_object(generation, where, "an object of JSON, or none of this file")
    weights = SafetensorsFolder(args.input)
    _check_weights(weights, shape, args.input)
    plan = _plan_of_windows(content, sparsity, where)
    if plan is None and content["model_type"] in WINDOW_KEYS and given.get("use_sliding_window") is True:
        unused = f"sliding_window={given.get('sliding_window')}, max_window_layers={content.get('max_window_layers')}"
        print(f"import-hf: {unused}: transformers gives no layer a window; the model is dense", file=sys.stderr)
    if shape.experts is not None and content.get(ROUTER_LOSS):
        print(
            f"import-hf: {ROUTER_LOSS}={content[ROUTER_LOSS]}: train.sh balances no experts, as transformers without "
            "output_router_logits; add --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff "
            f"{content[ROUTER_LOSS]:g} to do it",
            file=sys.stderr,
        )
    if plan is not None:
        sparsity = _resolved(SparsityConfig.from_data(plan), content, shape)
    flags = megatron_flags(content, shape)
    stored = _stored_arguments(args.input, content, shape, sparsity, flags)
    own_plan = [] if plan is None else [plan_flag(args.output)]
    words = launch_words(args.output, flags + own_plan, stored, shape.vocab_size, gpus)
    layout, fit = layout_of(words, shape.padded_vocab_size, gpus)
    needed = (
        sum(math.prod(size) for size in megatron_shapes(shape, stacked=shape.stacked).values())
        * _dtype(weights).itemsize
    )
    with complete_folder(args.output, "--output", needed) as work:
        (work / "release").mkdir()
        writer = TorchDistWriter(work / "release")
        write_checkpoint(writer, weights, shape)
        writer.add_object("common_state/shard_0_1", [{"args": stored, "checkpoint_version": 3.0, "iteration": 0}])
        writer.finish()
        (work / "latest_checkpointed_iteration.txt").write_text("release")
        (work / SCRIPT).write_text(launch_script(args.output, words, layout, gpus.kind))
        (work / SCRIPT).chmod(0o755)
        if plan is not None:
            (work / PLAN).write_text(plan_text(plan))
            sparsity = _resolved(load_config(work / PLAN), content, shape)  # the logits are those of the file
        if args.no_logit_check:
            checked = "logits not compared with transformers: --no-logit-check"
        else:
            from s2_megatron.tools.hf.logit_check import compare_logits

            checked = compare_logits(args.input, content, work / "release", shape, flags, sparsity)
    size = sum(path.stat().st_size for path in (args.output / "release").iterdir())
    print(f"wrote {args.output}: {shape.num_layers} layers, {size / 1e9:.2f} GB; {checked}")
    if fit:
        print(fit)
    print(launch_text(args.output, [*words, *layout], sparse=sparsity is not None))
    return 0


def _plan_of_windows(content: dict, sparsity: ResolvedSparsity | None, where: str) -> dict | None:
    """The YAML of the windows of a model of transformers, as data; None where it has none."""
    if content["model_type"] == MODEL_TYPE:
        return None
    windows = source_windows(content, where)
    if not any(windows):
        return None
    if sparsity is not None:
        raise ValueError(
            f"{where}: config.json has s2_sparsity, and sliding_window={content['sliding_window']}; expected one of "
            "both; remove the one that the weights were trained without"
        )
    return plan_data(windows)


def _resolved(config: SparsityConfig, content: dict, shape: Shape) -> ResolvedSparsity:
    return config.resolve(
        num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        seq_length=content["max_position_embeddings"],
    )  # fmt: skip


def _config(folder: Path) -> dict:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"--input {folder}: config.json cannot be read ({error}); expected a Hugging Face folder on this machine"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--input {folder}: config.json holds {printable(repr(content))}; expected an object with the model's "
            "settings; save the model again with save_pretrained"
        )
    return content


def _dtype(weights: SafetensorsFolder) -> torch.dtype:
    return weights.tensors["model.embed_tokens.weight"].dtype


def _check_weights(weights: SafetensorsFolder, shape: Shape, folder: Path) -> None:
    """Raises ValueError unless the folder has exactly the weights of the model that its config names."""
    if f"model.layers.{shape.num_layers - 1}.input_layernorm.weight" not in weights.tensors:
        layers = {name.split(".")[2] for name in weights.tensors if name.startswith("model.layers.")}
        raise ValueError(
            f"--input {folder}: config.json has num_hidden_layers={shape.num_layers}, the weights are of "
            f"{len(layers)} layers; expected as many; correct the config, or copy the missing files"
        )
    expected = {name: size for piece in pieces(shape) for name, size in piece.hf}
    found = {name: tensor.shape for name, tensor in weights.tensors.items() if not name.endswith(_ROPE_BUFFER)}
    if shape.tied:
        _check_tied(weights, found.pop("lm_head.weight", None), folder)
    problems = [f"{name} is unknown" for name in found if name not in expected]
    problems += [f"{name} is missing" for name in expected if name not in found]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(size)}"
        for name, size in expected.items()
        if name in found and found[name] != size
    ]
    fused = next((name for name in found if name.endswith(".experts.gate_up_proj")), None)
    if fused is not None and shape.experts is not None:
        raise ValueError(
            f"--input {folder}: {fused} holds all experts of a layer; expected tensors of each expert, as published "
            "folders have them; load it with transformers, and save it again with save_pretrained"
        )
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"--input {folder}: the weights are not those that config.json names: {'; '.join(problems[:3])}{more}; "
            "expected a complete Llama- or Qwen-shaped model"
        )
    dtypes = {tensor.dtype for name, tensor in weights.tensors.items() if name in expected}
    if len(dtypes) > 1:
        raise ValueError(f"--input {folder}: weights of several dtypes ({', '.join(map(str, dtypes))}); expected one")


def _check_tied(weights: SafetensorsFolder, head: tuple[int, ...] | None, folder: Path) -> None:
    """Raises ValueError when the head differs from the embedding. head: its shape, or None without a head."""
    embedding = weights.tensors.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    tensors = (weights.read(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head != embedding.shape or not torch.equal(*tensors):
        raise ValueError(
            f"--input {folder}: lm_head.weight is not model.embed_tokens.weight, and config.json has "
            "tie_word_embeddings=true, with which it would be lost; expected equal weights; set tie_word_embeddings to "
            "false if the model has a head of its own, else remove lm_head.weight"
        )


def write_checkpoint(writer: TorchDistWriter, weights: SafetensorsFolder, shape: Shape) -> None:
    """All weights, in their own dtype. Rows of the embedding beyond the vocabulary are zeros."""
    from rich.progress import track

    shapes = megatron_shapes(shape, stacked=shape.stacked)
    for piece in track(list(pieces(shape)), "importing", disable=not sys.stdout.isatty()):
        tensor = piece.join([weights.read(name) for name, _ in piece.hf])
        first = (piece.first, *(0 for _ in piece.shape[1:]))
        if piece.layer is not None:
            prefix, place, _ = _of_layer(shape, piece.layer, piece.expert)
            for _ in place:
                tensor = tensor[None]
            size = shapes[prefix + piece.name]
            names = [piece.name]
            if piece.name == BEFORE_EXPERTS[0] and shape.has_experts(piece.layer):
                names = BEFORE_EXPERTS
            for name in names:
                writer.add(prefix + name, size, (*place, *first), tensor)
            continue
        writer.add(piece.name, shapes[piece.name], first, tensor)
        missing = shapes[piece.name][0] - tensor.shape[0]
        if missing:
            words, hidden = tensor.shape
            writer.add(piece.name, shapes[piece.name], (words, 0), torch.zeros(missing, hidden, dtype=tensor.dtype))
    writer.add_object(f"{_FINAL_NORM}._extra_state/shard_0_1", [None])
    more = [*_NORMS] if shape.qk_norm else []
    if shape.softmax_type == "learnable":
        more.append(_OFFSETS)
    for layer in range(shape.num_layers):
        mlp = [(module, None) for module in _MLP]
        if shape.has_experts(layer):
            mlp = [(f"{EXPERTS}{name}", expert) for expert in range(shape.experts.count) for name in _OF_EXPERTS]
            mlp.append((BEFORE_EXPERTS[1].removesuffix(".weight"), None))
        for module, expert in [*((module, None) for module in (*_ATTENTION, *more)), *mlp]:
            prefix, place, of = _of_layer(shape, layer, expert)
            shard = "_".join(".".join(map(str, numbers)) for numbers in (place, of)) if place else "0_1"
            writer.add_object(f"{prefix}{module}._extra_state/shard_{shard}", [None])


def _of_layer(shape: Shape, layer: int, expert: int | None) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """How the names of a layer's weights begin in a checkpoint, and where in the stack of all layers, and of a layer's
    experts, its own stand: (prefix, places, how many there are)."""
    prefix, place, of = (LAYERS, (layer,), (shape.num_layers,)) if shape.stacked else (f"{LAYERS}{layer}.", (), ())
    return (prefix, place, of) if expert is None else (prefix, (*place, expert), (*of, shape.experts.count))


def _stored_arguments(
    folder: Path, content: dict, shape: Shape, sparsity: ResolvedSparsity | None, flags: list[str]
) -> argparse.Namespace:
    """What Megatron stores with a checkpoint: all its arguments, here the defaults with the model's flags."""
    from s2_megatron.megatron.model.rope_scaling import RECORD
    from s2_megatron.tools.hf.checkpoint_model import quiet

    with quiet():
        from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

        install_if_no_gpu()
        from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(flags)
    args.seq_length = content["max_position_embeddings"]
    args.layernorm_epsilon = getattr(args, "layernorm_epsilon", content["rms_norm_eps"])
    setattr(args, RECORD, args.rope_scaling_factor)
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        args.tokenizer_type, args.tokenizer_model = TOKENIZER, str(folder.resolve())
    if sparsity is not None:
        args.s2_sparsity, args.seq_length = sparsity.canonical_json(), sparsity.seq_length
    return args
