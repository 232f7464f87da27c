"""Megatron's own training loop on a machine without a GPU: `torch.cuda` calls and `device="cuda"` land on the CPU.

For tests and for small runs such as the quickstart, over gloo. It must be installed before Megatron is imported,
because Megatron binds some of the patched functions by name:

    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu
    install_if_no_gpu()
    from megatron.training import pretrain

Afterwards `torch.cuda.is_available()` is true in this process; ask `is_installed()` to know better.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import sys
import time
import types

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from s2_megatron.printing import print_once

# Arguments of Megatron that ask for a GPU, and their flags.
ON_GPUS_ONLY = {
    "nccl_ub": "--use-nccl-ub",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "gpu_sniff_test_interval": "--gpu-sniff-test-interval",
    "record_memory_history": "--record-memory-history",
    "optimizer_cuda_graph": "--optimizer-cuda-graph",
}
# Packages that Megatron uses when they are installed and that work on a GPU only.
GPU_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")


def _to_cpu(device):
    """'cpu' for a device argument that names a GPU ('cuda', 'cuda:0', 0, torch.device('cuda')); any other argument
    unchanged."""
    if isinstance(device, int) or getattr(device, "type", str(device)).startswith("cuda"):
        return "cpu"
    return device


# What names a device without a keyword; all other calls name one by `device=`, or none.
_NAMING_DEVICES = frozenset((torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.to))


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects the device of tensor factories, Tensor.to and Tensor.cuda, and reports CPU tensors' type() as
    CUDA's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in _NAMING_DEVICES:
            return func(*args)
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by names such as 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int | str | torch.device):
            args = (args[0], _to_cpu(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs["device"] = _to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        for name in ("output_split_sizes", "input_split_sizes"):
            # Of all_to_all_single: Megatron's MoE makes them lists by moving them off the GPU, where these never were.
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return func(*args, **kwargs)


class _NoStream:
    """A CUDA stream or event that does nothing: on the CPU everything is already in order."""

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, event=None):
        return event or _NoStream()

    def query(self):
        return True

    def elapsed_time(self, end_event):
        return 0.0

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def _returns(value):
    # A new function per name: torch._dynamo refuses one object registered under two names.
    return lambda *args, **kwargs: value


def _replacements() -> dict:
    """{name in torch.cuda: what it becomes}"""
    device = dict(
        is_available=_returns(True),
        device_count=_returns(1),
        current_device=_returns(0),
        set_device=_returns(None),
        is_current_stream_capturing=_returns(False),
        get_device_capability=_returns((9, 0)),
        get_device_properties=_returns(types.SimpleNamespace(major=9, minor=0, name="CPU")),
    )
    streams = dict(
        Stream=_NoStream,
        Event=_NoStream,
        current_stream=lambda device=None: _NoStream(),
        synchronize=_returns(None),
        stream=lambda stream: contextlib.nullcontext(),
    )
    memory = dict(
        empty_cache=_returns(None),
        memory_allocated=_returns(0),
        max_memory_allocated=_returns(0),
        memory_reserved=_returns(0),
        max_memory_reserved=_returns(0),
        device_memory_used=_returns(0),
        memory_stats=_returns({}),
    )
    random_numbers = dict(
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        default_generators=(torch.default_generator,),
        _lazy_call=lambda callback, **kwargs: callback(),
        _lazy_init=_returns(None),
    )
    return {**device, **streams, **memory, **random_numbers}


def is_installed() -> bool:
    """Whether `torch.cuda` stands for the CPU in this process."""
    return torch.cuda.Stream is _NoStream


def compute_device() -> torch.device:
    """Where this process's models compute: its current GPU, or the CPU."""
    return (
        torch.device("cpu")
        if is_installed() or not torch.cuda.is_available()
        else torch.device("cuda", torch.cuda.current_device())
    )


def _leave_out_gpu_packages() -> None:
    """Hide Transformer Engine and Apex from Megatron, which would take their optimizers and norms: those launch CUDA
    kernels."""
    found = [name for name in GPU_PACKAGES if name not in sys.modules and importlib.util.find_spec(name) is not None]
    for name in found:
        sys.modules[name] = (
            None  # `import name` now raises ModuleNotFoundError, which Megatron expects where a package is missing
        )
    if found:
        print_once(f"No GPU found: {', '.join(found)} left out")


def _meshes_of_the_cpu() -> None:
    """torch's FSDP2 asks a mesh, not its tensors, where the parameters lie; Megatron makes its meshes for "cuda"."""
    make = DeviceMesh.__init__

    @functools.wraps(make)
    def made(self, device_type, *args, **kwargs):
        make(self, _to_cpu(device_type), *args, **kwargs)

    DeviceMesh.__init__ = made


def _coalesced_collectives_end_at_once() -> None:
    """Wait for coalesced collectives where they are launched. With several all-gathers of Megatron-FSDP under way in
    gloo's threads, ranks died of a damaged heap (docs/validation.md, what failed once). Other collectives are waited
    for by the callers' handles. Sends and receives must not be waited for here: they would wait for each other."""

    def append(self, work=None):
        if work is not None:
            work.wait()

    distributed_c10d._CoalescingManager.append = append


def install_if_no_gpu() -> bool:
    """Make `torch.cuda` stand for the CPU when there is no GPU, and say so once. True when this process runs on the CPU
    that way.

    Raises ValueError when Megatron's training is imported already.
    """
    if is_installed():
        return True
    if torch.cuda.is_available():
        return False
    if "megatron.training" in sys.modules:
        raise ValueError(
            "install_if_no_gpu() behind the import of Megatron (apply_s2 imports it, too), which bound functions of "
            "torch.cuda; expected it before; make it the first lines of the script"
        )
    _leave_out_gpu_packages()
    for name, value in _replacements().items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    # Megatron's @jit_fuser is torch.compile: compiling small functions for the CPU takes longer than running them.
    torch.compile = lambda fn=None, **kwargs: fn if fn is not None else (lambda function: function)
    torch.accelerator.is_available = _returns(False)  # DataLoader(pin_memory=True) asks this one
    mode = _CudaMeansCpu()
    mode.__enter__()
    run_backward = torch.autograd._engine_run_backward

    def run_backward_redirected(*args, **kwargs):
        # torch.autograd.backward is a call that the mode is off in: a recomputed layer's backward runs in one.
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_redirected
    _meshes_of_the_cpu()
    _coalesced_collectives_end_at_once()
    atexit.register(_wait_for_gloo)
    # The "GPU" generator and the CPU's are one generator here, so the cross check of Megatron's RNG tracker always
    # warns.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    print_once(
        "No GPU found: this run takes the CPU. It computes the same, slowly; use a GPU for more than tests and small "
        "models."
    )
    return True


def _wait_for_gloo() -> None:
    """A moment in which gloo's threads can drop the tensors of the last collectives, before the interpreter ends.

    They need the interpreter for it. A thread that comes later aborts the process, with status 134 and "terminate
    called without an active exception" (torch 2.14). Destroying the process groups would wait for the threads
    of groups that nobody else holds; Megatron holds some.
    """
    if torch.distributed.is_initialized():
        time.sleep(0.1)


def require_cpu_settings(args) -> None:
    """Check Megatron's parsed arguments for what a run on the CPU cannot do.

    Raises ValueError, naming the flag, for a backend and graphs that need a GPU and for data loader processes.
    """
    for flag, name, expected in (
        ("--distributed-backend", "distributed_backend", "gloo"),
        ("--num-workers", "num_workers", 0),
        ("--cuda-graph-impl", "cuda_graph_impl", "none"),
    ):
        value = getattr(args, name)
        if value != expected:
            raise ValueError(f"{flag} {value} on a machine without a GPU; expected {expected}; add {flag} {expected}")
    for name, flag in ON_GPUS_ONLY.items():
        if getattr(args, name):
            raise ValueError(f"{flag} on a machine without a GPU; expected none of it; leave {flag} out")
