"""A checkpoint knows the sparsity it was trained with, and a resume under another one is refused before the model is
built.

Megatron stores its arguments in every checkpoint; `args.s2_sparsity` (`ResolvedSparsity.canonical_json()`) is one of
them. A checkpoint without it is dense, or has Megatron's own windows. What an attention attends is in no weight, so a
checkpoint's weights fit every sparsity: only resuming is at stake.
"""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.config.sinks import without_sink
from s2_megatron.config.sparsity import ResolvedSparsity, diff_sparsity
from s2_megatron.megatron.checkpoints.folder import CheckpointError, StoredCheckpoint, checkpoint_to_load, remedy
from s2_megatron.megatron.checkpoints.translation import (
    compare_models,
    finetune_note,
    flag_for_weights,
    is_translated,
    loads_weights_only,
    pattern_of,
)
from s2_megatron.megatron.model.rope_scaling import DEFAULT, computed_factor
from s2_megatron.megatron.sparsity import dense_sparsity, stock_sparsity
from s2_megatron.printing import print_once

# What a checkpoint's weights have to agree on with the model: the arguments' names.
SHAPE = (
    "num_layers",
    "hybrid_layer_pattern",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "swiglu",
    "normalization",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "position_embedding_type",
    "untie_embeddings_and_output_weights",
)
TRANSLATED = ("num_layers", "hybrid_layer_pattern", "num_experts")  # of which translation.py says what fits
# And with multi-latent attention. --q-lora-rank left out is a shape, too.
LATENT_SHAPE = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def find_checkpoint(args: Namespace) -> StoredCheckpoint | None:
    """The checkpoint that Megatron will load under these arguments, read by Megatron's own functions; None when there
    is none.

    Raises CheckpointError (a ValueError) for one that is not complete or cannot be read; of a node's ranks, the first
    one looks. Reads the small common part of a torch_dist checkpoint; the file of rank 0 in the legacy `torch` format.
    """
    from megatron.training import checkpointing

    folder, loading, setting = args.load, args, "--load"
    if args.pretrained_checkpoint is not None and not checkpointing.checkpoint_exists(folder):
        # Megatron then loads this one as with --finetune.
        folder, setting = args.pretrained_checkpoint, "--pretrained-checkpoint"
        loading = Namespace(**{**vars(args), "finetune": True})
    if folder is None:
        return None
    local = "://" not in str(folder)
    if local and int(os.environ.get("LOCAL_RANK", "0")) == 0:  # Megatron would end the process with status 0
        checkpoint_to_load(Path(folder), setting=setting, step=args.ckpt_step)
    with warnings.catch_warnings():
        # One process reads for itself, which is what torch.distributed.checkpoint wants to point out.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Without local checkpoints, which only all ranks together can find.
        only_local = args.non_persistent_ckpt_type == "local"
        reading = Namespace(**{**vars(args), "non_persistent_ckpt_type": None}) if only_local else args
        try:
            state, _, release, kind = checkpointing._load_base_checkpoint(folder, reading, rank0=True)
            stored = state.get("args") if state else None
            iteration = state.get("iteration", 0) if state else 0
            scheduler = state.get("opt_param_scheduler") if state else None
            content = state.get("content_metadata") if state else None
        except (Exception, SystemExit) as error:  # damaged files raise almost anything
            known = remedy(Path(folder)) if local else "load another one"
            raise CheckpointError(
                f"{setting}={folder}: the arguments in the checkpoint cannot be read ({type(error).__name__}: "
                f"{printable(' '.join(str(error).split()), 200)}); expected a checkpoint of Megatron; {known}"
            ) from error
    if stored is None:
        return None
    weights_only = release or loads_weights_only(loading, stored)
    if loading.finetune:
        scheduler = None
    return StoredCheckpoint(folder, stored, iteration, weights_only, scheduler, content, kind.name)


def _padding(args: Namespace) -> int:
    return args.make_vocab_size_divisible_by * args.tensor_model_parallel_size


def compare_shapes(args: Namespace, checkpoint: StoredCheckpoint) -> None:
    """Raises ValueError when the checkpoint is of a model with other shapes than this run's, or of another model that
    Megatron does not translate.

    Vocabularies may differ in their padding, which depends on the tensor-parallel ranks.
    """
    stored, found = checkpoint.args, []
    translated = compare_models(args, checkpoint)
    for name in SHAPE:
        if translated and name in TRANSLATED:
            continue
        flag, theirs, ours = f"--{name.replace('_', '-')}", getattr(stored, name, None), getattr(args, name, None)
        if name == "hybrid_layer_pattern":
            theirs, ours = pattern_of(stored), pattern_of(args)
        if name == "num_query_groups":
            theirs = theirs if getattr(stored, "group_query_attention", False) else stored.num_attention_heads
            ours = ours if args.group_query_attention else args.num_attention_heads
        if name == "hybrid_layer_pattern":  # one of pipeline stages may be cut otherwise
            theirs, ours = (pattern and pattern.replace("|", "") for pattern in (theirs, ours))
        if theirs is not None and theirs != ours:
            found.append(f"{flag} {printable(theirs)}, not {printable(ours)}")
    found += _latent_differences(stored, args)
    theirs, ours = getattr(stored, "padded_vocab_size", None), getattr(args, "padded_vocab_size", None)
    if theirs and ours and abs(theirs - ours) >= max(_padding(args), _padding(stored)):
        found.append(f"a vocabulary of {theirs} (padded), not {ours}")
    if found:
        raise ValueError(
            f"--load {checkpoint.folder}: iteration {checkpoint.iteration} is of another model, with "
            f"{'; '.join(found)}; expected equal shapes; give these flags, or load another checkpoint"
        )


def _latent_differences(stored: Namespace, args: Namespace) -> list[str]:
    theirs, ours = (bool(getattr(of, "multi_latent_attention", False)) for of in (stored, args))
    if theirs != ours:
        return ["--multi-latent-attention" if theirs else "no --multi-latent-attention"]
    found = []
    for name in LATENT_SHAPE if ours else ():
        before, now = (printable(getattr(of, name)) for of in (stored, args))
        if before != now:
            found.append(f"--{name.replace('_', '-')} {before}, not {now}")
    return found


def compare_with_checkpoint(args: Namespace, sparsity: ResolvedSparsity | None) -> StoredCheckpoint | None:
    """Compares this run's sparsity (None: Megatron's own, without --s2-config) and shapes with those of the checkpoint
    that it is about to load.

    Local checkpoints (--non-persistent-ckpt-type local) can only be read by Megatron's ranks together; theirs is
    compared when they are loaded (hooks.py). Returns the checkpoint. Raises ValueError as `compare_sparsity` does.
    """
    checkpoint = find_checkpoint(args)
    if checkpoint is not None:
        compare_shapes(args, checkpoint)
        compare_sparsity(args, sparsity, checkpoint)
        compare_softmax_type(args, checkpoint)
        compare_rope_scaling(args, checkpoint)
        for note in (dropout_note(args, checkpoint), finetune_note(args, checkpoint)):
            if note is not None:
                print_once(f"S2: {note}")
    return checkpoint


def compare_softmax_type(args: Namespace, checkpoint: StoredCheckpoint) -> None:
    """Raises CheckpointError where this run has another --softmax-type than a run that it resumes, and always where it
    has learnable offsets and the checkpoint none. Otherwise prints it where only weights are loaded."""
    ours, theirs = (getattr(each, "softmax_type", "vanilla") for each in (args, checkpoint.args))
    if ours == theirs:
        return
    text = f"--load {checkpoint.folder}: its model was trained with --softmax-type {theirs}, this run has {ours}"
    if ours == "learnable":
        raise CheckpointError(
            f"{text}, whose softmax_offset the checkpoint lacks; expected the same; give --softmax-type {theirs}, or "
            "train with learnable offsets from the start"
        )
    if not checkpoint.weights_only:
        raise CheckpointError(
            f"{text}; expected the same; give --softmax-type {theirs}, or add "
            f"{flag_for_weights(args, checkpoint.args)} to load the weights only"
        )
    print_once(f"S2: {text}")


def compare_rope_scaling(args: Namespace, checkpoint: StoredCheckpoint) -> None:
    """Raises ValueError where this run would turn with another factor than a run did that it resumes with equal flags:
    one of which the flag never reached the model. Prints it where only weights are loaded."""
    stored = checkpoint.args
    if not getattr(args, "use_rope_scaling", False) or computed_factor(stored) in (None, args.rope_scaling_factor):
        return
    if stored.rope_scaling_factor != args.rope_scaling_factor:  # another flag: meant
        return
    text = (
        f"--load {checkpoint.folder}: its model computed --rope-scaling-factor {computed_factor(stored):g}, though the "
        f"flag said {args.rope_scaling_factor:g}, which Megatron did not hand on; this run computes "
        f"{args.rope_scaling_factor:g}"
    )
    if not checkpoint.weights_only:
        raise CheckpointError(f"{text}; expected the same model; give --rope-scaling-factor {DEFAULT:g} to go on")
    print_once(f"S2: {text}")


def dropout_note(args: Namespace, checkpoint: StoredCheckpoint) -> str | None:
    """What to say when this run drops, and the model that it loads was trained without dropout."""
    found = [
        f"--{name.replace('_', '-')} {getattr(args, name):g}"
        for name in ("hidden_dropout", "attention_dropout")
        if getattr(args, name, None) and getattr(checkpoint.args, name, None) == 0
    ]
    if not found:
        return None
    flags = " and ".join(text.rsplit(" ", 1)[0] + " 0" for text in found)
    return (
        f"WARNING: this run has {' and '.join(found)} (0.1 is Megatron's default), and the model in --load "
        f"{checkpoint.folder} was trained with 0; give {flags}"
    )


def compare_sparsity(args: Namespace, sparsity: ResolvedSparsity | None, checkpoint: StoredCheckpoint) -> None:
    """Compares this run's sparsity (None: Megatron's own, without --s2-config) with a checkpoint's.

    Prints the differences when only weights are loaded, or when --s2-allow-sparsity-change says that they are meant.
    Otherwise raises CheckpointError with one line for each kind of change and the layers it concerns. The backend, the
    parallel layout, the sequence length and the name of the YAML may differ.
    """
    stored = getattr(checkpoint.args, "s2_sparsity", None)
    # Translated, Megatron counts other layers for its windows.
    if stored is None and sparsity is None and not is_translated(args, checkpoint.args):
        return
    allowed = checkpoint.weights_only or args.s2_allow_sparsity_change
    theirs = stock_sparsity(checkpoint.args).canonical_json() if stored is None else stored
    ours = (sparsity or stock_sparsity(args)).canonical_json()
    try:
        differences = diff_sparsity(theirs, ours)
    except ValueError as error:
        if not allowed:
            raise CheckpointError(
                f"--load {checkpoint.folder}: {error}; or add --s2-allow-sparsity-change to load it all the same"
            ) from error
        differences = [f"not comparable: {error}"]
    if not differences:
        return
    lines = "".join(f"\n  {line}" for line in differences)
    where = f"the checkpoint in {checkpoint.folder} (iteration {checkpoint.iteration})"
    if not allowed:
        fix = "resume without --s2-config"
        if stored is not None:
            fix = (
                "add --s2-config with the YAML it was trained with"
                if sparsity is None
                else "resume with the YAML it was trained with"
            )
        raise CheckpointError(
            f"{where} was trained with another sparsity; this run (now on the right) would resume it with its "
            f"optimizer:{lines}\n{fix}; or add {flag_for_weights(args, checkpoint.args)} to load its weights only, or "
            "--s2-allow-sparsity-change to continue with the new one"
        )
    how = "only its weights are loaded" if checkpoint.weights_only else "--s2-allow-sparsity-change"
    print_once(f"S2: {where} was trained with another sparsity, now on the right ({how}):{lines}")
    was_dense = theirs == dense_sparsity(checkpoint.args).canonical_json()
    # Offsets that were learned are the sink; a first token out of sight costs nothing known then.
    was_dense = was_dense and getattr(checkpoint.args, "softmax_type", "vanilla") == "vanilla"
    if sparsity is not None and was_dense and (hidden := without_sink(sparsity)) is not None:
        print_once(f"S2: WARNING: {hidden}")
