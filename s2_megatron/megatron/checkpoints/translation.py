"""A GPT's checkpoint in a HybridModel: Megatron translates it while it is loaded (core/dist_checkpointing/
gpt_checkpoint_interop.py), the i-th attention layer (`*`) and the i-th MLP (`-` or `E`) from the GPT's layer i.

Megatron finds what it cannot translate after the model is built, or not at all; here it is found before.
"""

from __future__ import annotations

from argparse import Namespace

from s2_megatron.config.errors import printable
from s2_megatron.megatron.checkpoints.folder import CheckpointError, StoredCheckpoint
from s2_megatron.megatron.sparsity import attention_places, layer_symbols

# Formats of --dist-ckpt-optim-fully-reshardable: those in which the optimizer's state has the names of the weights.
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
MAMBA = "M"  # a layer that begins anew between those of the GPT
MLPS = {"-": "a dense MLP (-)", "E": "experts (E)"}


def pattern_of(args: Namespace) -> str | None:
    """--hybrid-layer-pattern of Megatron's arguments, also of those that an older release stored; None of a GPT's."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next((found for name in names if (found := getattr(args, name, None)) is not None), None)


def is_translated(args: Namespace, stored: Namespace) -> bool:
    """Whether a run of `args` loads the checkpoint of a GPT, saved by one of `stored`, into a HybridModel."""
    return pattern_of(args) is not None and pattern_of(stored) is None


def flag_for_weights(args: Namespace, stored: Namespace) -> str:
    """The flag with which Megatron takes nothing but the weights. --finetune alone leaves a HybridModel the optimizer's
    state of a GPT."""
    return "--no-load-optim" if is_translated(args, stored) else "--finetune"


def loads_weights_only(args: Namespace, stored: Namespace) -> bool:
    """Whether a run of `args` takes no optimizer state from a checkpoint with the arguments `stored`."""
    finetune = bool(args.finetune) and not is_translated(args, stored)
    return finetune or bool(args.no_load_optim) or bool(getattr(stored, "no_save_optim", False))


def finetune_note(args: Namespace, checkpoint: StoredCheckpoint) -> str | None:
    """What to say where --finetune stands for the weights alone, and Megatron takes more."""
    if not args.finetune or checkpoint.weights_only:
        return None
    return (
        f"--finetune with the GPT in --load {checkpoint.folder}: Megatron loads its optimizer's state into the "
        "HybridModel all the same, and wants its --lr and --min-lr; add --no-load-optim for the weights alone"
    )


def compare_models(args: Namespace, checkpoint: StoredCheckpoint) -> bool:
    """Whether a run of `args` has Megatron translate this checkpoint.

    Raises CheckpointError for a GPT's that Megatron cannot load into the HybridModel of `args`, or only as another
    model, and for a HybridModel's in a GPT.
    """
    where = f"--load {checkpoint.folder}: iteration {checkpoint.iteration}"
    pattern = pattern_of(checkpoint.args)
    if pattern is not None and pattern_of(args) is None:
        raise CheckpointError(
            f"{where} is of a HybridModel, and this run builds a GPT; expected a HybridModel, as Megatron translates a "
            f"GPT's checkpoint, but none back; give --hybrid-layer-pattern '{pattern}', and leave --num-layers out"
        )
    if not is_translated(args, checkpoint.args):
        return False
    found = _difference(args, checkpoint)
    if found is not None:
        raise CheckpointError(
            f"{where} is of a GPT, and this run builds a HybridModel of {args.hybrid_layer_pattern}: {found}"
        )
    return True


def _difference(args: Namespace, checkpoint: StoredCheckpoint) -> str | None:
    """What is in the way, what was expected, and what to do."""
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import gpt_compatible_layer_maps

    stored, content = checkpoint.args, checkpoint.content or {}
    if checkpoint.kind != "GLOBAL":
        return f"its format is {checkpoint.kind}; expected torch_dist, which alone is translated; save it so by the GPT"
    # Before a pattern is advised: with none of these there is one.
    if getattr(stored, "moe_layer_freq", 1) != 1 or content.get("singleton_local_shards"):
        return "it was saved layer by layer, which Megatron does not translate; expected equal layers; train the GPT on"
    if getattr(stored, "use_rope_scaling", False):
        return "it was trained with --use-rope-scaling, which a HybridModel has not; expected none; train the GPT on"
    try:
        layers = gpt_compatible_layer_maps(args.hybrid_layer_pattern).num_gpt_layers
    except ValueError as error:
        return f"Megatron cannot translate it ({error}); expected layers of a GPT; repeat *- or *E"
    symbol = "-" if getattr(stored, "num_experts", None) is None else "E"
    fix = f"give --hybrid-layer-pattern '{f'*{symbol}' * stored.num_layers}'"
    if layers != stored.num_layers:
        return (
            f"it has {stored.num_layers} layers, and the pattern {layers} attention layers (*); expected equal "
            f"numbers; {fix}"
        )
    of_gpt = layer_symbols(args.hybrid_layer_pattern).replace(MAMBA, "")
    if of_gpt != f"*{symbol}" * layers:
        return f"a layer of it is attention (*), then {MLPS[symbol]}; expected these in turn; {fix}"
    if symbol == "E" and args.num_experts != stored.num_experts:
        return (
            f"it has --num-experts {stored.num_experts}, not {args.num_experts}; expected equal numbers; give its own"
        )
    if (theirs := _without_rope(stored)) != (ours := _without_rope(args)):
        return (
            f"its attention layers {theirs} (counted from 0) have no RoPE by --no-rope-freq, and here {ours}; expected "
            "the same; give a list with an entry for each symbol of the pattern"
        )
    sharding = content.get("distrib_optim_sharding_type")
    takes_optimizer = args.use_distributed_optimizer and not checkpoint.weights_only
    if takes_optimizer and sharding not in RESHARDABLE:
        return (
            f"the state of its distributed optimizer has the format {printable(sharding)}; expected fully_reshardable; "
            "add --no-load-optim for the weights alone, or let the GPT save with --dist-ckpt-optim-fully-reshardable"
        )
    return None


def _without_rope(args: Namespace) -> list[int]:
    """Which attention layers, counted among them, have no RoPE by --no-rope-freq."""
    every = getattr(args, "no_rope_freq", None)
    if not every:
        return []
    skipped = every if isinstance(every, list) else [int((layer + 1) % every == 0) for layer in range(args.num_layers)]
    return [index for index, place in enumerate(attention_places(args)) if skipped[place : place + 1] == [1]]
