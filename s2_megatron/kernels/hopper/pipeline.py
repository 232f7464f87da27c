"""Stages of shared memory: one partition of a program fills them, others empty them, one stage after the other and
round again.

A pipeline that is made has to be used. Triton gives the memory of one that nobody uses to something else, such as the
word through which an atomic's result reaches a warpgroup, and the hardware caches barriers: it may write one back over
that word later. tests/kernels/test_compile.py looks for such words.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from s2_megatron.kernels.hopper.gluon_versions import aggregate


@aggregate
class Pipeline:
    """The barriers of some stages. count: how many stages the caller has filled, or emptied, before this one."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def stage(self, count):
        return count % self.STAGES

    @gluon.jit
    def full_barrier(self, count):
        """Of the stage that is filled next."""
        return self.full.index(count % self.STAGES)

    @gluon.jit
    def wait_full(self, count):
        mbarrier.wait(self.full.index(count % self.STAGES), (count // self.STAGES) & 1)

    @gluon.jit
    def wait_empty(self, count):
        mbarrier.wait(self.empty.index(count % self.STAGES), ((count // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, count):
        """The caller has read the stage."""
        mbarrier.arrive(self.empty.index(count % self.STAGES), count=1)


@gluon.jit
def make_pipeline(STAGES: gl.constexpr, FILLS: gl.constexpr, READERS: gl.constexpr):
    """FILLS: arrivals that fill a stage: one for the bytes of TMA, one for each other store; asynchronous copies add
    their own. READERS: partitions that empty it."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=FILLS)
        mbarrier.init(empty.index(stage), count=READERS)
    return Pipeline(full, empty, STAGES)
