"""Kernels as they would be launched, without a GPU: what each launch is specialised by, as Triton for sm_90 sees it."""

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@dataclass
class Launch:
    """kernel: the JITFunction. specialization: (type, key) of each argument. arguments: its values by name. options:
    num_warps, ..."""

    kernel: JITFunction
    specialization: list
    arguments: dict
    options: dict

    @property
    def variant(self) -> str:
        """Equal for launches of one compiled variant."""
        return f"{self.specialization} {sorted(self.options.items())}"

    @property
    def attributes(self) -> dict:
        """What the specialisation knows of argument i: {(i,): [["tt.divisibility", 16]]}."""
        known = [
            (i, key)
            for i, (kind, key) in enumerate(self.specialization)
            if kind != "constexpr" and isinstance(key, str)
        ]
        return {(i,): _BACKEND.parse_attr(key) for i, key in known}

    @property
    def signature(self) -> dict[str, str]:
        return {name: kind for name, (kind, _) in zip(self.kernel.arg_names, self.specialization)}

    @property
    def constants(self) -> dict:
        return {name: self.arguments[name] for name, kind in self.signature.items() if kind == "constexpr"}


def launch_of(kernel, *args, **kwargs) -> Launch:
    """What Triton makes of the arguments of a launch."""
    binder = create_function_from_signature(kernel.signature, kernel.params, _BACKEND)
    arguments, specialization, _ = binder(*args, **kwargs)
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    return Launch(kernel, specialization, dict(arguments), options)


def record_launches() -> list[Launch]:
    """From here on kernels are not launched in this process: the list that is returned grows instead."""
    launches = []

    def run(kernel, *args, grid, warmup, **kwargs):
        launches.append(launch_of(kernel, *args, **kwargs))

    JITFunction.run = run
    return launches


def believe_in_hopper() -> None:
    """Lets kernels/dispatch.py choose the Gluon kernels for Hopper for tensors on any device."""
    from s2_megatron.kernels import dispatch as launch
    from s2_megatron.kernels import trial
    from s2_megatron.kernels.hopper import launch as hopper

    hopper._multiprocessors = lambda device: 132
    launch._is_hopper = lambda device: True
    trial.MEASURED = (trial.release(),)  # nothing runs: a new version of Triton needs no trial
