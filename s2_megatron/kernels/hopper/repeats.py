"""All launches of a forward or a backward again, for other tensors of the same kinds: what a short call's host time goes
into otherwise (views, checks, grids, arguments) is done once."""
from __future__ import annotations

import torch

from s2_megatron.kernels.hopper.descriptors import Repeat
from s2_megatron.kernels.hopper.gluon_versions import compile_settings, current_stream

ALIGNED = 256  # bytes, as torch allocates


class Launched:
    """The launches of one call, written down while they are made."""

    def __init__(self, device: torch.device):
        self.device = device
        self.launches: list[tuple[Repeat | None, list, list]] = []  # with the tensors of boxes (or None) and pointers
        self.scratch: list[torch.Tensor] = []  # tensors of this call alone, without values
        self.zeros: list[torch.Tensor] = []  # tensors of this call alone, of zeros

    def start(self, launches, kernel, boxes, pointers, strided, **constants) -> None:
        """The arguments of Launches.start behind the first one."""
        repeat = launches.start(kernel, boxes, pointers, strided, **constants)
        self.launches.append((repeat, [box and box.tensor for box in boxes], pointers))

    def empty(self, *shape, dtype=torch.float32) -> torch.Tensor:
        self.scratch.append(torch.empty(shape, dtype=dtype, device=self.device))
        return self.scratch[-1]

    def zero_counters(self, count: int) -> torch.Tensor:
        """int32 [count]."""
        self.zeros.append(torch.zeros(count, dtype=torch.int32, device=self.device))
        return self.zeros[-1]

    def again(self, given, constant) -> RepeatedCall | None:
        """given: the call's tensors (or None), the results among them. constant: a tensor that outlives the call. None
        when a launch cannot be repeated, takes a tensor that was made for this call in another way, or one that is
        given twice, so that another call may have two in its place."""
        known = [*given, constant, *self.zeros, *self.scratch]
        number = {id(tensor): index for index, tensor in enumerate(known) if tensor is not None}
        if len(number) < sum(tensor is not None for tensor in known):
            return None
        launches = []
        for repeat, boxes, pointers in self.launches:
            if repeat is None or any(id(tensor) not in number for tensor in (*boxes, *pointers) if tensor is not None):
                return None
            launches.append((repeat, [-1 if tensor is None else number[id(tensor)] for tensor in boxes],
                             [number[id(tensor)] for tensor in pointers]))
        return RepeatedCall(self, launches, constant)


class RepeatedCall:
    """The launches of a call, made again: RepeatedCall(tensors), in the order of `given`. The tensors have the shapes,
    strides, types, device and alignment (to 16 bytes) of those. Returns whether it made them: not after a change of
    Triton's settings."""

    def __init__(self, launched: Launched, launches, constant: torch.Tensor):
        self._device, self._launches, self._constant = launched.device, launches, constant
        self._settings = compile_settings()
        self._zeros = [len(tensor) for tensor in launched.zeros]
        self._offsets, self._bytes = [], 0
        for tensor in launched.scratch:
            self._offsets.append(self._bytes)
            self._bytes += -(-tensor.nbytes // ALIGNED) * ALIGNED

    def __call__(self, *given) -> bool:
        if compile_settings() != self._settings:
            return False
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(*given)
        zeros = [torch.zeros(count, dtype=torch.int32, device=self._device) for count in self._zeros]
        scratch = torch.empty(self._bytes, dtype=torch.uint8, device=self._device) if self._bytes else self._constant
        begin, stream = scratch.data_ptr(), current_stream()
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in (*given, self._constant, *zeros)]
        addresses += [begin + offset for offset in self._offsets]
        addresses.append(None)  # of a box that is none: the last one
        for repeat, boxes, pointers in self._launches:
            repeat.start(stream, [addresses[box] for box in boxes], [addresses[pointer] for pointer in pointers])
        return True
