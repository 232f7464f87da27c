"""Runs what the tests ask for in forks of a process that has imported Megatron once, which takes longer than the rest.

Usage: forked_tools.py; reads JSON lines {"command": [arguments of s2-megatron], "set": {"module:NAME": value}},
{"logits": {...}}, {"compare": {...}} or {"save": {...}} and answers each with {"status", "out", "err"}. set: constants
that are changed before. logits: load (a checkpoint folder), output (.npz), dense_core, s2_config (or null), words;
writes `tokens` [1, longest] and for each length `logits_<length>` [length, rows of the embedding] in fp32. compare: the
check of import-hf with another plan: source (the Hugging Face folder), load, plan (a YAML as data), flags (behind the
model's). save: has Megatron write the checkpoint of a random model: load (the folder to make), plan (a YAML as data),
tokens (how many), output (.npz with `tokens` and the model's `logits`), and, beside the defaults, sizes (of shape_of),
flags, mtp_layers, pattern (of a HybridModel) and what else arguments_of takes.
"""

import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

LENGTHS = (1, 63, 64, 65, 1000)


def text_of(words):
    """Tokens [1, longest]."""
    import torch

    return torch.randint(0, words, (1, max(LENGTHS)), generator=torch.Generator().manual_seed(3))


def logits(load, output, dense_core, s2_config, words):
    import numpy as np
    import torch

    from s2_megatron.tools.hf.checkpoint_model import load_model
    from s2_megatron.tools.hf.torch_dist import iteration_folder

    config = None if s2_config is None else Path(s2_config)
    loaded = load_model(iteration_folder(Path(load)), s2_config=config, dense_core=dense_core)
    tokens = text_of(words)
    positions = torch.arange(max(LENGTHS)).unsqueeze(0)
    result = {"tokens": tokens.numpy()}
    with torch.no_grad():
        for length in LENGTHS:
            # Megatron's own dense core wants a mask: True is hidden. Ours reads none.
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1) if dense_core == "stock" else None
            result[f"logits_{length}"] = loaded.model(tokens[:, :length], positions[:, :length], mask)[0].numpy()
    np.savez(output, **result)
    return 0


def compare(source, load, plan, flags=()):
    from s2_megatron.config.load import SparsityConfig
    from s2_megatron.tools.hf.architecture import config_as_read, megatron_flags, shape_of_config
    from s2_megatron.tools.hf.logit_check import compare_logits

    content = config_as_read(json.loads((Path(source) / "config.json").read_text()), source)
    shape = shape_of_config(content, 128)
    sizes = dict(num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads)
    sparsity = SparsityConfig.from_data(plan).resolve(**sizes, seq_length=content["max_position_embeddings"])
    try:
        flags = [*megatron_flags(content, shape), *flags]
        print(compare_logits(Path(source), content, Path(load) / "release", shape, flags, sparsity))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def save(load, plan, tokens, output, sizes=None, flags=(), mtp_layers=0, pattern=None, **arguments):
    import numpy as np
    import torch
    from megatron.core import dist_checkpointing

    from s2_megatron.config.load import SparsityConfig
    from s2_megatron.tools.hf.architecture import megatron_flags, plain_config
    from s2_megatron.tools.hf.checkpoint_model import build_model, quiet
    from s2_megatron.tools.hf.import_hf import _stored_arguments
    from s2_megatron.tools.hf.weights import Experts
    from tests.huggingface.stock_checkpoints import arguments_of, shape_of

    experts = (sizes or {}).pop("experts", None)
    shape = shape_of(**sizes or {}, experts=experts and Experts(**experts))
    content = plain_config(arguments_of(shape, **arguments), shape, "float32")
    sizes = dict(num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads)
    sparsity = SparsityConfig.from_data(plan).resolve(**sizes, seq_length=1024, mtp_num_layers=mtp_layers)
    flags = [*megatron_flags(content, shape), *flags]
    if pattern is not None:
        sparsity = dataclasses.replace(sparsity, places=tuple(range(0, len(pattern), 2)))
        flags = [flag for flag in flags if "--moe-layer-freq" not in flag] + [f"--hybrid-layer-pattern={pattern}"]
    args = _stored_arguments(Path(load), content, shape, sparsity, flags)
    model = build_model(flags, sparsity, seq_length=1024, dtype=torch.float32)
    generator, text = torch.Generator().manual_seed(0), text_of(shape.vocab_size)[:, :tokens]
    folder = Path(load) / "release"
    folder.mkdir(parents=True)
    with torch.no_grad(), quiet():
        for weight in model.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1))
        dist_checkpointing.save({"args": args, "model": model.sharded_state_dict()}, str(folder))
        logits = model(text, torch.arange(tokens).unsqueeze(0), None)[0].numpy()
    for child in multiprocessing.active_children():  # of Megatron's save; os._exit would leave it behind
        child.terminate()
    (Path(load) / "latest_checkpointed_iteration.txt").write_text("release")
    np.savez(output, tokens=text.numpy(), logits=logits)
    return 0


def run(request) -> int:
    if "compare" in request:
        return compare(**request["compare"])
    if "save" in request:
        return save(**request["save"])
    if "logits" in request:
        return logits(**request["logits"])
    from s2_megatron.tools.commands import main

    for place, value in request.get("set", {}).items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, value)
    return main(request["command"])


def in_fork(request) -> dict:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 1
            try:
                status = run(request)
            except SystemExit as end:
                status = end.code
            finally:
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()  # the parent shows it
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return {"status": status, "out": texts[0], "err": texts[1]}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not disturb the answers
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    import megatron.training.checkpointing  # noqa: F401

    import s2_megatron.huggingface
    import s2_megatron.tools.hf.checkpoint_model  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(in_fork(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
