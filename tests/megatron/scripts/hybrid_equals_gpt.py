"""A GPT of N layers beside a HybridModel of `*-` repeated N times (`*E` with experts), from equal weights, both trained
for some steps in this process.

Usage: hybrid_equals_gpt.py FLAGS OF pretrain_gpt_s2.py for the GPT; prints one JSON object: of "gpt" and "hybrid" the
losses and gradient norms, the numbers of layers that S2 computes, the sum of all routers' losses by their names, and
"weights", how many were copied by name.
"""

import json
import re
import sys

STEPS, BATCH = 4, 2
HALVES = {"*": ("input_layernorm", "self_attention"), "-": ("pre_mlp_layernorm", "mlp")}


def in_gpt(name: str, pattern: str) -> str:
    """What the weight `name` of the HybridModel is called in the GPT."""
    found = re.fullmatch(r"(mtp\.layers\.\d+\.mtp_model_layer)\.layers\.([01])\.(\w+)\.(.+)", name)
    if found is not None:  # a depth is one GPT layer
        assert found[3] in HALVES["*-"[int(found[2])]], name
        return f"{found[1]}.{found[3]}.{found[4]}"
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(\w+)\.(.+)", name)
    if found is None:
        return name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    place, part, rest = int(found[1]), found[2], found[3]
    assert part in HALVES["*" if pattern[place] == "*" else "-"], name
    same = [at for at, symbol in enumerate(pattern) if (symbol == "*") == (pattern[place] == "*")]
    return f"decoder.layers.{same.index(place)}.{part}.{rest}"


def copied(hybrid, gpt, pattern: str) -> int:
    """Copies all weights; every weight of either model must have its counterpart of the same shape."""
    import torch

    theirs, ours = dict(gpt.named_parameters()), dict(hybrid.named_parameters())
    names = {name: in_gpt(name, pattern) for name in ours}
    assert sorted(names.values()) == sorted(theirs), sorted(set(names.values()) ^ set(theirs))
    with torch.no_grad():
        for name, weight in ours.items():
            assert weight.shape == theirs[names[name]].shape, name
            weight.copy_(theirs[names[name]])
    return len(names)


def trained(model, vocabulary: int, length: int) -> dict[str, list[float]]:
    import torch

    torch.manual_seed(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    positions = torch.arange(length).repeat(BATCH, 1).cuda()
    losses, norms = [], []
    for _ in range(STEPS):
        tokens = torch.randint(0, vocabulary, (BATCH, length + 1)).cuda()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        gradients = [weight.grad.double() for weight in model.parameters()]  # every one must have one
        losses.append(loss.item())
        norms.append(sum(float((gradient**2).sum()) for gradient in gradients) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def main():
    from single_process import build, built, prepared

    flags = sys.argv[1:]
    args, gpt = build(flags)
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
    from megatron.training.global_vars import unset_global_variables

    from s2_megatron.megatron.model.core_attention import S2CoreAttention

    unset_global_variables()
    pattern = ("*E" if args.num_experts else "*-") * args.num_layers
    depths = f"/{pattern[:2]}" * (args.mtp_num_layers or 0)
    _, config = prepared([*flags, "--hybrid-layer-pattern", pattern + depths])
    hybrid = built(config)
    result = {"weights": copied(hybrid, gpt, pattern)}
    for name, model in (("gpt", gpt), ("hybrid", hybrid)):
        destroy_moe_metrics_tracker()  # made for the layers of the other model
        named = [(path, module) for path, module in model.named_modules() if isinstance(module, S2CoreAttention)]
        cores = [module for _, module in named]
        of_mtp = [re.search(r"\bmtp\.layers\.(\d+)", path) for path, _ in named]
        result[name] = {
            "model": type(model).__name__,
            "s2_layers": [core.layer_number - 1 for core, depth in zip(cores, of_mtp) if depth is None],
            "s2_depths": [int(depth[1]) for depth in of_mtp if depth is not None],
            "patterns": [core.local_pattern.describe() for core in cores],
            **trained(model, args.vocab_size, args.seq_length),
            "routers": {name: entry.values.sum().item() for name, entry in get_moe_metrics_tracker().metrics.items()},
        }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
