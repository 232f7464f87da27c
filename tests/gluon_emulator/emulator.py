"""Runs Gluon kernels for Hopper as plain Python on a machine without a GPU: partitions as threads, shared memory and
barriers as objects. Two programs run at a time, the others after them.

    monkeypatch.setattr(GluonJITFunction, "run", Machine(seed).run)

Barriers count arrivals and bytes as the hardware does, phases by their parity. What is asynchronous happens as early or
as late as it may, by chance: copies in between the steps of all partitions, products when they are waited for. What a
partition stores in global memory others see once it releases it, or at its end. Where nothing can go on, or a barrier
is arrived at too often, AssertionError. Layouts of registers are not looked at; of shared memory, the order of its
chunks of 128 bytes is. fp16 only: NumPy has no bf16.
"""

import inspect
import threading
from random import Random
from types import SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction

from tests.gluon_emulator.memory import Box, Pointer, Shared, memory_of
from tests.gluon_emulator.translate import compiled, plain_class, to, where


class Barrier:
    def __init__(self):
        self.phase, self.count, self.due, self.bytes = 0, None, None, 0

    def init(self, count):
        self.count = self.due = count

    def arrive(self, count):
        assert self.due >= count, "more arrivals than the barrier waits for"
        self.due -= count
        self._turn()

    def copied(self, size):
        self.bytes -= size
        self._turn()

    def _turn(self):
        assert self.bytes >= 0 or self.due, "bytes that nobody expects"
        if self.due == 0 and self.bytes == 0:
            self.phase, self.due = self.phase + 1, self.count


class Product:
    """A wgmma on its way."""

    def __init__(self, left, right, start):
        self.operands, self.value = (left, right, start), None

    def finish(self):
        if self.value is None:
            left, right, start = (
                part.value if isinstance(part, Product) else part.read() if isinstance(part, Shared) else part
                for part in self.operands
            )
            left, right = (
                torch.from_numpy(part.astype(np.float32)) for part in (left, right)
            )  # NumPy's threads would get in the way
            self.value = (left @ right).numpy() + (0 if start is None else start)


class Partition:
    def __init__(self, name, program):
        self.name, self.program, self.turn, self.waits = name, program, threading.Semaphore(0), None
        self.products, self.stores, self.numbers, self.unfenced, self.over = [], [], [], False, False
        self.kept, self.together, self.polled = (
            [],
            True,
            None,
        )  # stores that others do not see; whether a barrier followed them; a flag's value


class Machine:
    """Runs launches of Gluon kernels on CPU tensors. seed: of when things happen."""

    def __init__(self, seed=0):
        self.random = Random(seed)

    def run(self, kernel, *arguments, grid, warmup=False, **options):
        """Stands for GluonJITFunction.run."""
        bound = inspect.signature(kernel.fn).bind(
            *arguments, **{name: value for name, value in options.items() if name in kernel.arg_names}
        )
        values = {}
        for name, value in bound.arguments.items():
            if isinstance(value, torch.Tensor):
                value = Pointer(memory_of(value))
            values[name] = Box(value) if hasattr(value, "block_shape") else value
        self.functions, self.programs, threads = {}, grid[0], torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for first in range(0, grid[0], 2):
                self.parts, self.copies, self.failure, self.done = [], [], None, threading.Semaphore(0)
                for program in range(first, min(first + 2, grid[0])):
                    self.partition, self.shared_bytes = Partition("main", program), 0
                    self.plain(kernel)(**values)
                    assert self.shared_bytes <= 232448
                self.go()
        finally:
            torch.set_num_threads(threads)

    # Functions

    def plain(self, function):
        """A jitted function as a Python one, with the machine's operations."""
        if function not in self.functions:
            given = function.fn.__globals__
            namespace = {
                name: value.value if isinstance(value, gl.constexpr) else value for name, value in given.items()
            }
            namespace.update(
                gl=self.language(),
                mbarrier=self.barriers(),
                tma=SimpleNamespace(store_wait=self.wait_stores),
                async_copy=SimpleNamespace(mbarrier_arrive=self.arrive_with_numbers),
                tma_load=self.copy_in,
                tma_store=self.copy_out,
                tma_add=self.add_out,
                copy_to_shared=self.copy_numbers,
                reinterpret=lambda buffer, dtype, shape, layout: buffer.reinterpret(dtype, shape),
                thread_barrier=self.meet,
                _to=to,
                warpgroup_mma=self.multiply,
                warpgroup_mma_wait=self.wait_products,
                fence_async_shared=self.fence,
                quotient=lambda number, divisor: number // divisor if divisor else 0,
            )
            made = {}
            exec(compiled(function), namespace, made)
            found = made[function.fn.__name__]
            self.functions[function] = found
            for name, value in given.items():
                if isinstance(value, GluonJITFunction) and name not in ("quotient", "reinterpret"):
                    namespace[name] = self.plain(value)
                elif hasattr(value, "aggregate_fields"):
                    namespace[name] = self.plain_aggregate(value)
        return self.functions[function]

    def plain_aggregate(self, aggregate):
        """A class of the same fields and methods."""
        if aggregate not in self.functions:
            self.functions[aggregate] = made = plain_class(aggregate)
            for name, member in vars(aggregate).items():
                if isinstance(member, GluonJITFunction):
                    setattr(made, name, self.plain(member))
        return self.functions[aggregate]

    def language(self):
        layouts = "NVMMADistributedLayout DotOperandLayout SliceLayout BlockedLayout"
        return SimpleNamespace(
            **{name: lambda *_, **__: None for name in layouts.split()},
            constexpr=None,
            SwizzledSharedLayout=lambda *_: None,
            NVMMASharedLayout=lambda bytes, bits, rank: bytes * 8 // bits,
            float32=np.float32,
            int32=np.int32,
            int64=np.int64,
            where=where,
            maximum=np.maximum,
            minimum=np.minimum,
            exp2=np.exp2,
            log2=np.log2,
            max=np.max,
            static_range=range,
            sum=lambda values, axis: (
                np.sum(values, axis=axis).item() if values.ndim == 1 else np.sum(values, axis=axis)
            ),
            zeros=lambda shape, dtype, layout: np.zeros(shape, dtype),
            zeros_like=np.zeros_like,
            full=lambda shape, value, dtype, layout: np.full(shape, value, dtype),
            arange=lambda low, high, layout: np.arange(low, high),
            load=lambda pointer, mask=True, other=None, cache_modifier="": pointer.load(mask, other),
            store=self.store,
            convert_layout=lambda values, layout: values,
            program_id=lambda axis: self.partition.program,
            num_programs=lambda axis: self.programs,
            atomic_add=self.atomic_add,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize,
        )

    def barriers(self):
        return SimpleNamespace(
            init=lambda barrier, count: barrier.init(count),
            expect=self.expect,
            arrive=self.arrive,
            wait=self.wait,
            MBarrierLayout=lambda: "barrier",
        )

    # Partitions: one runs at a time

    def specialize(self, parts, warps, registers):
        """What comes last in a kernel: the partitions of a program wait for their turn from here on."""
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        for number, (function, arguments) in enumerate(parts):
            part = Partition(
                f"{function.__name__} {number} of program {self.partition.program}", self.partition.program
            )
            threading.Thread(target=self.work, args=(part, function, arguments), daemon=True).start()
            self.parts.append(part)

    def go(self):
        self.partition = self.parts[0]
        self.partition.turn.release()
        self.done.acquire()
        if self.failure is not None:
            raise self.failure
        assert not self.copies

    def work(self, part, function, arguments):
        part.turn.acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):
                    function(*arguments)
                self.wait_stores(0)
                self.release()
                assert not part.products and not part.numbers
        except BaseException as error:  # noqa: BLE001 (raised in the main thread)
            self.failure = self.failure or error
        part.over = True
        self.switch()

    def switch(self):
        """Another partition's turn, or the same one's again; in between copies arrive. Returns in this one's next
        turn."""
        mine = self.partition
        while self.failure is None and not all(part.over for part in self.parts):
            able = [part for part in self.parts if not part.over and (part.waits is None or part.waits())]
            if self.copies and (not able or self.random.random() < 0.3):
                self.copies.pop(self.random.randrange(len(self.copies)))()
            elif able:
                self.partition = self.random.choice(able)
                break
            else:
                where = {
                    part.name: inspect.getclosurevars(part.waits).nonlocals for part in self.parts if not part.over
                }
                self.failure = AssertionError(f"nothing can go on: {where}")
        else:
            waiting = [part for part in self.parts if not part.over]
            if self.failure is None or not waiting or waiting == [mine]:
                self.done.release()
                if not mine.over:
                    raise self.failure
                return
            self.partition = next(part for part in waiting if part is not mine)
        if self.partition is not mine:
            self.partition.turn.release()
            if mine.over:
                return
            mine.turn.acquire()
        if self.failure is not None and not mine.over:
            raise self.failure

    # Operations

    def atomic_add(self, pointer, more, sem="acq_rel"):
        """An addition of 0 reads a flag; a partition that reads a value again waits until it is another one."""
        part = self.partition
        if more:
            assert not part.kept or (part.together and sem in ("release", "acq_rel")), (
                "other threads' stores are not released"
            )
            self.release()
            pointer.memory[pointer.at] += more
            value = pointer.load() - more
            self.switch()
            return value
        assert sem == "acquire"
        seen = part.polled
        part.waits = lambda: (pointer.at, pointer.load()) != seen
        self.switch()
        part.waits, part.polled = None, (pointer.at, pointer.load())
        return part.polled[1]

    def store(self, pointer, values, mask=True):
        self.partition.kept.append(lambda: pointer.store(values, mask))
        self.partition.together = False

    def meet(self):
        self.partition.together = True

    def release(self):
        while self.partition.kept:
            self.partition.kept.pop(0)()

    def allocate(self, dtype, shape, layout):
        if layout == "barrier":
            return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
        flat = np.full(int(np.prod(shape)), np.nan if np.issubdtype(dtype, np.floating) else -12345, dtype)
        self.shared_bytes += flat.nbytes
        return Shared(self, flat, shape, layout)

    def fence(self):
        self.partition.unfenced = False

    def expect(self, barrier, size):
        barrier.bytes += size
        barrier.arrive(1)

    def arrive(self, barrier, count):
        barrier.arrive(count)
        self.switch()

    def wait(self, barrier, parity):
        assert parity in (0, 1)
        self.partition.waits = lambda: barrier.phase & 1 != parity
        self.switch()
        self.partition.waits = None

    def copy_in(self, box, coordinates, barrier, place):
        assert place.shape == [1, 1, box.rows, box.columns]
        values = box.read(coordinates)
        place.write(np.full_like(values, np.nan))

        def arrive():
            place.write(values)
            barrier.copied(values.nbytes)

        self.copies.append(arrive)

    def copy_numbers(self, place, pointer, mask):
        assert place.shape == list(pointer.at.shape)
        place.write(np.full(place.shape, np.nan))
        self.partition.numbers.append(lambda: place.write(pointer.load(mask)))

    def arrive_with_numbers(self, barrier):
        barrier.due += 1
        copies, self.partition.numbers = self.partition.numbers, []

        def arrive():
            for copy in copies:
                copy()
            barrier.arrive(1)

        self.copies.append(arrive)

    def copy_out(self, box, coordinates, place):
        assert not self.partition.unfenced and place.shape == [1, 1, box.rows, box.columns]
        self.partition.stores.append(lambda: box.write(coordinates, place.read()[0, 0]))

    def add_out(self, box, coordinates, place):
        assert not self.partition.unfenced
        self.partition.stores.append(lambda: box.write(coordinates, box.read(coordinates) + place.read()[0, 0]))

    def wait_stores(self, left):
        stores = self.partition.stores
        while len(stores) > left:
            stores.pop(0)()

    def multiply(self, left, right, start, use_acc=True, is_async=False):
        assert is_async and not self.partition.unfenced
        product = Product(left, right, start if use_acc else None)
        self.partition.products.append(product)
        if self.random.random() < 0.5:
            for product_before in self.partition.products:
                product_before.finish()
        return product

    def wait_products(self, left, deps):
        products = self.partition.products
        while len(products) > left:
            products.pop(0).finish()
        found = [part.value if isinstance(part, Product) else part for part in deps]
        assert all(part is not None for part in found), "a product is used that has not been waited for"
        return found[0] if len(found) == 1 else tuple(found)
