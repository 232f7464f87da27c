"""Exports a checkpoint and compares the exported model's logits, and its greedy continuation, with those of Megatron's
own load of it.

Usage: exported.py LOAD OUTPUT [FLAG of export-hf ...]; prints "largest difference X of Y" and "same continuation of N
different tokens".
"""

import sys
from pathlib import Path


def main():
    from s2_megatron.tools import commands
    from s2_megatron.tools.hf.checkpoint_model import load_model
    from s2_megatron.tools.hf.torch_dist import iteration_folder

    load, output, *flags = sys.argv[1:]
    assert commands.main(["export-hf", "--load", load, "--output", output, *flags]) == 0
    loaded = load_model(iteration_folder(Path(load)))
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    tokens = torch.randint(0, 100, (1, 200), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = loaded.model(tokens, torch.arange(200).unsqueeze(0), None)
        logits = model(tokens, use_cache=False).logits
    from s2_megatron.tools.generate import chooser, continuation

    start = tokens[0, :70].tolist()
    ours = list(continuation(loaded.model, start, 90, chooser(0, 0, 0, logits.shape[-1])))
    settings = dict(max_new_tokens=90, do_sample=False, eos_token_id=None)
    theirs = model.generate(tokens[:, :70], attention_mask=torch.ones(1, 70, dtype=torch.long), **settings)
    assert theirs[0, 70:].tolist() == ours, (theirs[0, 70:], ours)
    print(f"same continuation of {len(set(ours))} different tokens")
    from s2_megatron.tools.losses import token_losses

    losses = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
    loss = (token_losses(loaded.model, tokens.numpy())[0] - losses).abs().max().item()
    largest = (logits - expected).abs().max().item()
    print(f"largest difference {largest:.3e} of {expected.abs().max().item():.3f}, of a loss {loss:.3e}")


if __name__ == "__main__":
    main()
