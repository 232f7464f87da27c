"""Whether the imported Megatron model computes what transformers computes from the source folder: the logits of one
short random text, of as many of the first layers as memory and time allow.

B batch (1), S tokens, V words.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from s2_megatron.config.errors import printable
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.config.stored import stored_sparsity
from s2_megatron.tools.hf.experts import layers_flag
from s2_megatron.tools.hf.weights import Shape

TOKENS = 256  # as many as the model has positions for, at most
WINDOWS = 4  # the text is as many windows long, or more
LARGEST = 1e-4  # difference of two logits beside the largest one; rounding in fp32 leaves a few 1e-6
MEMORY_SHARE = 0.5  # of what is free now, for one model in fp32 at a time
MOST_FLOPS = 2e13  # of both forwards together: about five minutes of a machine with few cores


class Extent(NamedTuple):
    """How much is compared. layers: 0 when nothing is. reason: why it is not everything."""

    layers: int
    reason: str


def extent(shape: Shape, free_bytes: int) -> Extent:
    """The first layers of a model that fit into memory and time."""
    qkv_and_out = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * shape.ffn_hidden_size
    layer = active = qkv_and_out + mlp  # parameters, and those that a token meets
    if shape.experts is not None:
        expert = 3 * shape.hidden_size * shape.experts.hidden
        layer = qkv_and_out + max(mlp, shape.experts.count * expert)
        active = qkv_and_out + max(mlp, shape.experts.top * expert)
    words = shape.padded_vocab_size * shape.hidden_size
    # fp32 weights, the logits, and the embedding once more while it is read
    fixed = 4 * (words * (2 if shape.tied else 3) + 2 * TOKENS * shape.padded_vocab_size)
    by_memory = int((free_bytes * MEMORY_SHARE - fixed) // (4 * layer))
    by_time = int((MOST_FLOPS / (4 * TOKENS) - words) // active)
    layers = max(0, min(shape.num_layers, by_memory, by_time))
    limit = "memory" if by_memory <= by_time else "time"
    return Extent(layers, "" if layers == shape.num_layers else f"not the rest, for its {limit}")


def compare_logits(
    source: Path, content: dict, checkpoint: Path, shape: Shape, flags: list[str], sparsity: ResolvedSparsity | None
) -> str:
    """Compares the imported model with its source; what to print about it.

    source: the Hugging Face folder. content: its config, of config_as_read. checkpoint: the torch_dist folder that was
    written. flags: those that the user is given. sparsity: what the user is given; None for a dense model. Windows of a
    stock model that are longer than a quarter of the text are shortened on both sides by the same number of tokens.
    Only once in a process, because it initialises Megatron. Raises ValueError when the logits differ, or transformers
    cannot load the source.
    """
    from s2_megatron.megatron.host.cuda_on_cpu import compute_device
    from s2_megatron.tools.hf.checkpoint_model import free_bytes

    # transformers' model is on the host, Megatron's on a GPU where there is one.
    layers, reason = extent(shape, min(free_bytes(torch.device("cpu")), free_bytes(compute_device())))
    if not layers:
        return f"not compared with transformers: one layer of the model takes too much ({reason.split()[-1]}) here"
    print(f"comparing logits of {layers} of {shape.num_layers} layers with transformers'", file=sys.stderr)
    length = min(TOKENS, content["max_position_embeddings"])
    tokens = torch.randint(0, shape.vocab_size, (1, length), generator=torch.Generator().manual_seed(48))  # [B, S]
    if sparsity is None:
        dense = (LayerSparsity("D", None),) * layers
        plan = ResolvedSparsity(dense, (), None, 64, shape.num_heads, shape.num_kv_heads, length)
    else:
        plan = dataclasses.replace(sparsity, layers=sparsity.layers[:layers])
    stock, window, said = content.get("s2_sparsity") is None, content.get("sliding_window"), ""
    if stock and window is not None:
        shown = min(window, max(1, length // WINDOWS))
        content = content | {"sliding_window": shown}
        plan = dataclasses.replace(plan, layers=tuple(_shortened(layer, window - shown) for layer in plan.layers))
        count = sum(layer.pattern is not None for layer in plan.layers)
        said = f", {count} with a window of {shown}" + (f" in place of {window}" if shown != window else "")
    expected = _source_logits(source, content, layers, None if stock else plan, tokens)
    found = _imported_logits(checkpoint, shape, flags, plan, tokens)[:, : shape.vocab_size]
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= LARGEST * largest or not math.isfinite(largest):
        raise ValueError(
            f"--input {source}: the imported model computes other logits than transformers (largest difference "
            f"{difference:.2g} of {largest:.2g}, {length} tokens, {layers} layers); expected the same; do not train it "
            "and report the folder's config.json"
        )
    what = f"all layers{said}" if layers == shape.num_layers else f"the first {layers} layers{said}, {reason}"
    return f"logits equal transformers' ({what}; largest difference {difference:.1g} of {largest:.2g})"


def _shortened(layer: LayerSparsity, tokens: int) -> LayerSparsity:
    """A layer whose window is shorter by so many tokens. One that is too short for it gets a window of 1, with which
    the logits differ."""
    if layer.pattern is None:
        return layer
    pattern = layer.pattern
    heads = tuple(dataclasses.replace(head, window=max(1, head.window - tokens)) for head in pattern.heads)
    return dataclasses.replace(layer, pattern=dataclasses.replace(pattern, heads=heads))


def _source_logits(
    source: Path, content: dict, layers: int, sparsity: ResolvedSparsity | None, tokens: torch.Tensor
) -> torch.Tensor:
    """Of transformers' own model, [S, V] in fp32."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    changed = copy.deepcopy(content) | {"num_hidden_layers": layers}
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(changed.get(name), list):
            changed[name] = changed[name][:layers]
    if sparsity is not None:
        changed["s2_sparsity"] = stored_sparsity(sparsity)
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source, config=CONFIG_MAPPING[content["model_type"]].from_dict(changed), dtype=torch.float32,
            attn_implementation="sdpa" if sparsity is None else "s2", local_files_only=True, output_loading_info=True,
        )  # fmt: skip
        if info["missing_keys"] or info["mismatched_keys"]:
            raise ValueError(f"it misses {info['missing_keys'] or info['mismatched_keys']}")
        with torch.no_grad():
            return model.eval()(tokens, use_cache=False).logits[0].float()
    except Exception as error:  # whatever transformers raises for a folder
        raise ValueError(
            f"--input {source}: transformers cannot load this folder ({type(error).__name__}: "
            f"{printable(' '.join(str(error).split()), 300)}), so the import cannot be compared with it; mend the "
            "folder, or give --no-logit-check to import it unseen"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _imported_logits(
    checkpoint: Path, shape: Shape, flags: list[str], sparsity: ResolvedSparsity, tokens: torch.Tensor
) -> torch.Tensor:
    """Of Megatron's model with the written weights, [S, rows of the embedding] in fp32. shape: of the
    checkpoint."""
    from s2_megatron.megatron.host.cuda_on_cpu import compute_device
    from s2_megatron.tools.hf.checkpoint_model import build_model, load_first_layers, load_weights, quiet

    layers = len(sparsity.layers)
    less = [f"--num-layers={layers}"]
    if shape.experts is not None and not shape.stacked:
        less.append(layers_flag(shape.experts.layers[:layers]))
    model = build_model(
        [*flags, *less],  # the last one holds
        sparsity, seq_length=tokens.shape[1], dtype=torch.float32,
    )  # fmt: skip
    load = load_weights if layers == shape.num_layers else load_first_layers
    load(model, checkpoint)
    device = compute_device()
    positions = torch.arange(tokens.shape[1], device=device).unsqueeze(0)  # [B, S]
    with torch.no_grad(), quiet():
        return model(tokens.to(device), positions, None)[0].float().cpu()
