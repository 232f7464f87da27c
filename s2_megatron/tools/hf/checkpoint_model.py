"""A Megatron checkpoint's arguments, and the model itself in one process, whatever layout it was trained in."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from s2_megatron.config.errors import printable
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.checkpoints.translation import pattern_of
from s2_megatron.printing import held
from s2_megatron.tools.hf.architecture import hf_config, megatron_flags, shape_of_arguments, sparsity_of_arguments
from s2_megatron.tools.hf.torch_dist import TorchDistReader
from s2_megatron.tools.hf.weights import Shape, megatron_shapes, stored_name


@contextlib.contextmanager
def quiet():
    """Megatron's imports report every package that is not installed."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as unseen, held(unseen):
        warnings.simplefilter("ignore")
        yield


def checkpoint_arguments(folder: Path) -> Namespace:
    """Megatron's arguments in a torch_dist checkpoint. Raises ValueError when they cannot be read."""
    with quiet():
        from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

        install_if_no_gpu()  # without it Megatron, which knows the types of its arguments, cannot be imported
        import megatron.training.checkpointing  # noqa: F401
        from megatron.core.dist_checkpointing import load_common_state_dict
        from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

        try:
            trained = load_common_state_dict(folder).get("args")
        except (Exception, CheckpointException) as error:  # whatever unpickling raises: the file is not Megatron's
            reason = f"{type(error).__name__}: {printable(' '.join(str(error).split()), 200)}"
            raise ValueError(
                f"{folder}: Megatron's arguments cannot be read ({reason}); the checkpoint is damaged; load another one"
            ) from error
    if trained is None:
        raise ValueError(f"{folder} holds no arguments of Megatron; expected a checkpoint of a training run")
    return trained


def free_bytes(device: torch.device) -> int:
    """Memory that a GPU, or this machine, can give now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _require_room(folder: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Raises ValueError for weights that this process cannot hold."""
    from s2_megatron.megatron.host.cuda_on_cpu import compute_device

    device, gib = compute_device(), 2**30
    sizes = {name: math.prod(size) for name, size in megatron_shapes(shape, stacked=shape.stacked).items()}
    # Megatron's loading joins the halves of SwiGLU's matrices beside the model; what a GPU has no room for, on the CPU.
    joined = sum(count for name, count in sizes.items() if name.endswith("linear_fc1.weight"))
    count, free = sum(sizes.values()), free_bytes(device)
    needed = count * dtype.itemsize / gib
    where, fix, loading = "its GPU", "take one with more memory", ""
    if device.type == "cpu":
        where, more = "this machine", joined * dtype.itemsize / gib
        needed, loading = needed + more, f" with {more:.1f} while they are loaded"
    else:
        on_cpu = 4 * (count + joined) / gib
        fix += f", or the CPU, with CUDA_VISIBLE_DEVICES= before the command ({on_cpu:.0f} GiB in fp32)"
    if needed * gib < free:
        return
    raise ValueError(
        f"--load {folder}: the weights take {needed:.1f} GiB in {str(dtype).removeprefix('torch.')}{loading}, and "
        f"{where} has {free / gib:.1f} free; expected room for all of them, for this command is one process; {fix}"
    )


class LoadedModel(NamedTuple):
    """A GPTModel or HybridModel in evaluation mode, what it was trained with, and its sparsity."""

    model: torch.nn.Module
    trained: Namespace
    sparsity: ResolvedSparsity


def load_model(
    folder: Path, *, s2_config: Path | None = None, dtype: torch.dtype = torch.float32, dense_core: str = "s2"
) -> LoadedModel:
    """The model of a torch_dist checkpoint (the iteration's folder), built by Megatron in this process and loaded by
    it.

    s2_config: the YAML, needed for block masks, else compared. dense_core: what computes dense layers, as
    --s2-dense-core. Once a process. Raises ValueError for a model that is not Llama- or Qwen-shaped, with or
    without experts of a softmax router, and for one that has no room here.
    """
    trained = checkpoint_arguments(folder)
    shape = shape_of_arguments(trained, f"--load {folder}", None)
    _require_room(folder, shape, dtype)
    sparsity = sparsity_of_arguments(trained, shape, s2_config)
    flags = megatron_flags(hf_config(trained, shape, sparsity, "float32"), shape)
    if pattern_of(trained) is not None:
        pairs = ("*E" if shape.has_experts(layer) else "*-" for layer in range(shape.num_layers))
        flags = [flag for flag in flags if not flag.startswith("--moe-layer-freq=")]
        flags.append(f"--hybrid-layer-pattern={''.join(pairs)}")
        sparsity = replace(sparsity, places=tuple(range(0, 2 * shape.num_layers, 2)))
    model = build_model(flags, sparsity, seq_length=trained.seq_length, dtype=dtype, dense_core=dense_core)
    load_weights(model, folder)
    return LoadedModel(model, trained, sparsity)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Has Megatron load a model's weights."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    stored = TorchDistReader(folder).shapes
    engines = {stored_name(name): name for name in stored if stored_name(name) != name}
    with quiet():
        metadata = dist_checkpointing.load_content_metadata(folder) or {}
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        for part in nested_values(state):  # Transformer Engine's layers wrote the norm before experts by another name
            if isinstance(part, ShardedTensor) and part.key not in stored:
                part.key = engines.get(part.key, part.key)
        model.load_state_dict(dist_checkpointing.load(state, str(folder))["model"])


def load_first_layers(model: torch.nn.Module, folder: Path) -> None:
    """Loads a model that has only the first layers of the checkpoint, whose layers are stacked: Megatron says where its
    weights stand in it, and would itself not take a part."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    reader = TorchDistReader(folder)
    with quiet(), torch.no_grad():
        state = model.sharded_state_dict()
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor):
                size = (*(1 for _ in range(part.prepend_axis_num)), *part.local_shape)
                part.data.copy_(reader.read(part.key, part.global_offset, size).view(part.local_shape))


def build_model(
    flags: list[str], sparsity: ResolvedSparsity, *, seq_length: int, dtype: torch.dtype, dense_core: str = "s2"
) -> torch.nn.Module:
    """The model of megatron_flags in evaluation mode, with weights that nobody has loaded. Once a process."""
    with quiet():
        from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

        install_if_no_gpu()
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training.arguments import parse_and_validate_args
        from megatron.training.initialize import initialize_megatron

        from s2_megatron.megatron.arguments import add_s2_arguments
        from s2_megatron.megatron.host.cuda_on_cpu import compute_device
        from s2_megatron.megatron.hybrid_specs import model_config_from_args
        from s2_megatron.megatron.layer_specs import apply_s2
        from s2_megatron.megatron.model.rope_scaling import check_rope_scaling, set_rope_scaling
        from s2_megatron.megatron.patches import use_prebuilt_dataset_helpers
        from s2_megatron.megatron.settings import S2Run, S2Settings

    flags = [
        *flags, f"--seq-length={seq_length}", "--micro-batch-size=1", "--transformer-impl=local",
        "--no-persist-layer-norm", "--no-rope-fusion", "--no-masked-softmax-fusion",
        "--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion", "--no-create-attention-mask-in-dataloader",
        "--tokenizer-type=NullTokenizer", "--vocab-size=2", "--mock-data", "--train-iters=1", "--lr=1e-4",
        "--num-workers=0", "--no-initialization",
        *(["--distributed-backend=gloo"] if compute_device().type == "cpu" else []),
        *{torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}.get(dtype, []),
    ]  # fmt: skip
    _one_process()
    with quiet(), _command_line(flags):
        use_prebuilt_dataset_helpers()
        args = parse_and_validate_args(extra_args_provider=add_s2_arguments)
        args.softmax_scale = sparsity.softmax_scale
        model_config = model_config_from_args(args)
        set_rope_scaling(args, model_config)
        apply_s2(model_config, S2Run(sparsity, S2Settings(dense_core=dense_core)))
        initialize_megatron()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = model_config.get_builder_cls()(model_config).build_model(groups)
        check_rope_scaling(args, [model])
        return model.to(device=compute_device(), dtype=dtype).eval()


def attention_layers(model: torch.nn.Module) -> int:
    """How many layers of a model have attention."""
    from megatron.core.transformer.attention import Attention

    return sum(isinstance(module, Attention) for module in model.modules())


def _one_process() -> None:
    """The environment that torchrun would have made."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0: any port
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@contextlib.contextmanager
def _command_line(flags: list[str]):
    """Megatron reads sys.argv."""
    before = sys.argv
    sys.argv = [before[0], *flags]
    try:
        yield
    finally:
        sys.argv = before
