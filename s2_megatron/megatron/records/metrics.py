"""The flags of S2-Attention and the density in wandb's config and in TensorBoard, to compare runs by them."""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from collections import Counter

import numpy as np

from s2_megatron.config.sparsity import ResolvedSparsity, joined_layers
from s2_megatron.megatron.records.run import device_name, flops_per_token
from s2_megatron.patterns.picture import draw_patterns
from s2_megatron.printing import print_once


def s2_settings(args: Namespace, sparsity: ResolvedSparsity) -> dict:
    """What is reported: plain values, nested only in lists and dictionaries."""
    return {
        "s2_config": str(args.s2_config),
        "s2_backend": args.s2_backend,
        "s2_dense_core": args.s2_dense_core,
        "s2_cp_comm_type": list(args.s2_cp_comm_type),
        "s2_cp_keep_received": args.s2_cp_keep_received,
        "s2_keep_attention_output": args.s2_keep_attention_output,
        "s2_density": sparsity.density(),
        "s2_layers": dict(Counter(layer.kind for layer in sparsity.all_layers)),
        "s2_plan": [layer.spec for layer in sparsity.layers],
        "s2_mtp_plan": [layer.spec for layer in sparsity.mtp_layers],
        "s2_patterns": {
            layer.spec: layer.pattern.describe() if layer.pattern is not None else "dense"
            for layer in sparsity.all_layers
        },
        "s2_block_size": sparsity.block_size,
        "s2_softmax_scale": sparsity.softmax_scale,
        "s2_sparsity": sparsity.canonical_json(),
    }


def report_run(args: Namespace, sparsity: ResolvedSparsity) -> None:
    """Tells wandb's config and TensorBoard what every run is compared by, S2 or not: its density, FLOPs per
    token and device.

    sparsity: stock_sparsity(args) for a run without --s2-config.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    wandb, writer = get_wandb_writer(), get_tensorboard_writer()
    if wandb is None and writer is None:
        return
    flops = flops_per_token(args)
    if wandb is not None:
        known = {"s2_density": sparsity.density(), "s2_flops_per_token": flops, "s2_device": device_name()}
        wandb.config.update(known, allow_val_change=True)
        _report_resumed(wandb.run)
    if writer is not None:
        writer.add_scalar("s2/density", sparsity.density(), 0)
        writer.add_text("s2/flops_per_token", json.dumps(flops), 0)
        writer.add_text("s2/device", device_name(), 0)
    _log_picture(sparsity, writer, wandb)


def _report_resumed(run) -> None:
    """Says what wandb does with iterations that are trained again after a resume: its steps never go back."""
    if run.resumed:
        # Not print_once: only the last rank has a wandb run.
        print(
            f"S2: wandb run {run.id} has steps up to {run.step - 1} from before; iterations up to there are not logged "
            "again, the run keeps their first values",
            file=sys.stderr,
        )


def _log_picture(sparsity: ResolvedSparsity, writer, wandb) -> None:
    """A picture of the distinct patterns, as s2/patterns; nothing for a dense model. writer, wandb: None where Megatron
    has not opened them."""
    layers: dict[int, list[str]] = {}
    patterns = {id(layer.pattern): layer.pattern for layer in sparsity.layers if layer.pattern is not None}
    for index, layer in enumerate(sparsity.layers):
        layers.setdefault(id(layer.pattern), []).append(str(index))
    if not patterns:
        return
    titled = [(f"layers {joined_layers(layers[key])}", pattern) for key, pattern in patterns.items()]
    from PIL import Image

    file = io.BytesIO()
    draw_patterns(titled, sparsity.n_blocks).savefig(file, format="png", dpi=110)
    picture = Image.open(file).convert("RGB")
    if writer is not None:
        writer.add_image("s2/patterns", np.asarray(picture), 0, dataformats="HWC")
    if wandb is not None and wandb.run.step == 0:
        wandb.log({"s2/patterns": wandb.Image(picture)}, 0)


def report_missing_flags(args: Namespace) -> None:
    """Says which flags a run with a wandb project lacks: Megatron gives wandb only what it gives to TensorBoard."""
    if not getattr(args, "wandb_project", ""):
        return
    if not args.tensorboard_dir:
        print_once(
            f"S2: WARNING: wandb project {args.wandb_project} will receive no curves: Megatron logs to wandb only what "
            "it logs to TensorBoard; add --tensorboard-dir PATH"
        )
        return
    missing = [
        f"--{flag.replace('_', '-')}"
        for flag in ("log_throughput", "log_timers_to_tensorboard")
        if not getattr(args, flag)
    ]
    if missing:
        print_once(f"S2: wandb project {args.wandb_project} will receive no throughput; add {' '.join(missing)}")


def report_s2_settings(args: Namespace, sparsity: ResolvedSparsity) -> None:
    """Adds the settings to wandb's config and to TensorBoard, on the rank where Megatron has opened them (the last
    one).

    Megatron starts wandb while it parses arguments, with the arguments as its config: the sparsity is known only
    afterwards, hence an update.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    settings = s2_settings(args, sparsity)
    wandb = get_wandb_writer()
    if wandb is not None:
        wandb.config.update(settings, allow_val_change=True)
    writer = get_tensorboard_writer()
    if writer is not None:
        for name, value in settings.items():
            if hasattr(args, name):
                continue  # Megatron writes its arguments itself
            writer.add_text(name.replace("s2_", "s2/", 1), value if isinstance(value, str) else json.dumps(value), 0)
