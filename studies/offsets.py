"""Make the checkpoint that a run with learnable softmax offsets begins with, unless that has been done, then train.

    python -m studies.offsets --load ... --s2-config chosen.yaml --data-path ... --write ... -- pretrain_gpt_s2.py ...

Each sparse head's offset begins at the logit that the first token has in the dense model, as the mean over the queries
that the plan's window hides it from: in the softmax it then stands in for that token, without its value. A dense head
sees the token itself; its offset begins at ABSENT. The weights go through export-hf and import-hf.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from s2_megatron.megatron.host.processes import signal_when_parent_ends

SEQUENCES = 8
ABSENT = -20.0  # next to nothing in a softmax, and it stays so: its gradient is as small


def first_token_logits(model, sequences: np.ndarray, first: int) -> np.ndarray:
    """Of every layer and head the mean logit of token 0 over the queries from `first` on, float64 [layers, heads].
    model: with S2-Attention in every layer. sequences: int64 [n, length + 1]."""
    import torch

    from s2_megatron.megatron.model.core_attention import S2CoreAttention
    from s2_megatron.tools.losses import token_losses

    cores = [module for module in model.modules() if isinstance(module, S2CoreAttention)]
    sums, hooks = {}, []

    def add(core, args) -> None:
        query, key = args[:2]  # [s, b, heads, dim], [s, b, KV heads, dim]
        token = key[0].float().repeat_interleave(query.shape[2] // key.shape[2], dim=1)
        scale = core.softmax_scale or query.shape[-1] ** -0.5
        logits = scale * torch.einsum("sbhd,bhd->h", query[first:].float(), token) / len(query[first:])
        sums[core.layer_number] = sums.get(core.layer_number, 0) + logits.double().cpu().numpy()

    for core in cores:
        hooks.append(core.register_forward_pre_hook(add))
    token_losses(model, sequences)
    for hook in hooks:
        hook.remove()
    return np.stack([sums[layer] for layer in sorted(sums)]) / len(sequences)


def window_of(sparsity) -> int:
    """The widest window of a plan's sparse heads, in tokens."""
    heads = [head for layer in sparsity.layers if layer.pattern is not None for head in layer.pattern.heads]
    return max(head.window for head in heads if not head.is_dense)


def with_dense_absent(logits: np.ndarray, sparsity) -> np.ndarray:
    """The offsets to begin with: ABSENT in dense heads."""
    offsets = logits.copy()
    for layer, own in zip(sparsity.layers, offsets, strict=True):
        heads = [True] * len(own) if layer.pattern is None else [head.is_dense for head in layer.pattern.heads]
        own[heads] = ABSENT
    return offsets


def add_offsets(folder: Path, offsets: np.ndarray) -> None:
    """Into a folder of export-hf. offsets: [layers, heads]."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    dtype = weights["model.norm.weight"].dtype
    for layer, own in enumerate(offsets):
        weights[f"model.layers.{layer}.self_attn.sinks"] = torch.tensor(own, dtype=dtype)
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"softmax_type": "learnable"}))


def make(load: Path, config: Path, data: str, write: Path) -> None:
    """Raises ValueError for bad input, and where a tool refuses."""
    from s2_megatron.config.load import load_config
    from s2_megatron.megatron.checkpoints.folder import checkpoint_to_load
    from s2_megatron.tools.hf.checkpoint_model import load_model
    from s2_megatron.tools.losses import evenly_chosen
    from studies.trained import model_dtype

    found = load_model(checkpoint_to_load(load).path, dtype=model_dtype())
    length = found.trained.seq_length
    shape = {name: getattr(found.sparsity, name) for name in ("num_heads", "num_kv_heads")}
    plan = load_config(config).resolve(num_layers=len(found.sparsity.layers), seq_length=length, **shape)
    sequences = evenly_chosen(data, range(1, 1 + SEQUENCES), length + 1, SEQUENCES)
    offsets = with_dense_absent(first_token_logits(found.model, sequences, window_of(plan)), plan)
    with tempfile.TemporaryDirectory(dir=write.parent) as work:
        folder = Path(work, "hf")
        _tool("export-hf", f"--load={load}", f"--output={folder}")
        add_offsets(folder, offsets)
        _tool("import-hf", f"--input={folder}", f"--output={write}", "--no-logit-check")


def _tool(*words: str) -> None:
    if status := _python("-m", "s2_megatron", *words):
        raise ValueError(f"{' '.join(words)} ended with status {status}")


def _python(*words: str) -> int:
    """The status of a process that ends with this one."""
    ends = functools.partial(signal_when_parent_ends, signal.SIGTERM)
    return subprocess.run([sys.executable, *words], preexec_fn=ends).returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.offsets", description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, help="the dense model's folder of checkpoints")
    parser.add_argument("--s2-config", type=Path, required=True, help="the plan")
    parser.add_argument("--data-path", required=True, help="a sequence a document, the first one spare")
    parser.add_argument("--write", type=Path, required=True, help="the folder to make")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parsed, script = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if not script:
        try:
            make(parsed.load, parsed.s2_config, parsed.data_path, parsed.write)
        except ValueError as error:
            parser.error(str(error))
        return
    # In a process of its own, which leaves no memory of the GPU to the training.
    if not parsed.write.exists() and (status := _python("-m", "studies.offsets", *sys.argv[1:at])):
        sys.exit(status)
    os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main()
