"""pretrain_gpt_s2.py with one alteration, named by ALTERATION: a function below, each of which says what it does."""

import dataclasses
import gc
import os
import time


def failing():
    """Every rank fails in its second step, as at an index out of range."""
    from megatron.training import training

    step, calls = training.train_step, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise IndexError("index out of range\nin self")
        return step(*args, **kwargs)

    training.train_step = fail


def dying():
    """Rank 1, at the exchange number AT_EXCHANGE, dies without a word or (HANGS=1) stops and does nothing more."""
    from s2_megatron.context_parallel.exchange import BlockExchange

    travel, calls = BlockExchange._travel, []

    def die(*args):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == int(os.environ["AT_EXCHANGE"]):
            if os.environ.get("HANGS") == "1":
                time.sleep(1000)
            os._exit(13)
        return travel(*args)

    BlockExchange._travel = die


def padded():
    """Conversations are padded for two context-parallel ranks, however many there are: the same data for all."""
    from s2_megatron.megatron import data as gpt_data

    settings = gpt_data.dataset_config

    def for_two(args):
        config = settings(args)
        config.context_parallel_size = 2
        return config

    gpt_data.dataset_config = for_two


def counted():
    """Every rank says at its end how often its attention's forward was computed, how often it sent its keys and values
    to the other ranks, and how many stored attention outputs were left over."""
    from s2_megatron.context_parallel.exchange import BlockExchange
    from s2_megatron.ops import reference
    from s2_megatron.ops.recompute import RecomputeOutputs

    counts = {"forwards": 0, "exchanges": 0}

    def counting(function, name):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    def say():
        left = sum(len(item) for item in gc.get_objects() if type(item) is RecomputeOutputs)
        print(
            f"\nattention forwards: {counts['forwards']}, exchanges: {counts['exchanges']}, results left over: {left}",
            flush=True,
        )

    reference.forward = counting(reference.forward, "forwards")
    BlockExchange.start = counting(BlockExchange.start, "exchanges")
    return say


def latent_stock():
    """Megatron's own local core attention in multi-latent attention. It computes values of another head dim than
    queries and keys; only its constructor does not take the two head dims, and counts with one."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build = DotProductAttention.__init__

    def build_latent(self, *args, k_channels=None, v_channels=None, **kwargs):
        build(self, *args, **kwargs)
        if v_channels is not None:  # Megatron builds one of the usual attention first, and drops it
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = build_latent


# What follows is a mistake each, which the parallel tests must see.


def head_offset():
    """Every tensor-parallel rank takes the heads of rank 0."""
    from s2_megatron.patterns.ranges import RangePattern

    slice_of = RangePattern.tensor_parallel_slice
    RangePattern.tensor_parallel_slice = lambda self, rank, size: slice_of(self, 0, size)


def layer_number():
    """Every pipeline stage counts its layers from 0 (of a HybridModel its attention layers)."""
    from s2_megatron.megatron import hybrid_specs, layer_specs
    from s2_megatron.megatron.model import check as model_check
    from s2_megatron.megatron.model import core_attention

    global_indices = layer_specs.global_layer_indices
    attention_layer, built = hybrid_specs.HybridAttentionLayer.__init__, []

    def of_local_order(self, *args, by_place, layer_number, **named):
        place = sorted(by_place)[len(built)]
        built.append(self)
        attention_layer(self, *args, by_place={layer_number - 1: by_place[place]}, layer_number=layer_number, **named)

    hybrid_specs.HybridAttentionLayer.__init__ = of_local_order
    layer_specs.global_layer_indices = lambda *args: list(range(len(global_indices(*args))))
    # Without what sees it sooner, so that the comparison of losses stands alone.
    model_check.check_model = lambda *args: None
    build = core_attention.S2CoreAttention.__init__
    core_attention.S2CoreAttention.__init__ = lambda self, *args, layer_index=None, **kwargs: build(
        self, *args, **kwargs
    )


def norm_gradient():
    """Under sequence parallelism the norms' gradients are not added up over the ranks."""
    from s2_megatron.megatron.model import norms

    norm = norms.sequence_parallel_norm

    def forgetful_norm(*args, **kwargs):
        module = norm(*args, **kwargs)
        module.weight.sequence_parallel = False
        return module

    norms.sequence_parallel_norm = forgetful_norm


def received_slots():
    """Blocks received from other context-parallel ranks are taken for one another."""
    from s2_megatron.context_parallel import attention as context_parallel

    make_plan = context_parallel.make_plan

    def mistaken_plan(*args):
        plan = make_plan(*args)
        slots = plan.remote_slot.copy()
        slots[slots >= 0] = slots[slots >= 0][::-1]
        return dataclasses.replace(plan, remote_slot=slots)

    context_parallel.make_plan = mistaken_plan


ALTERATIONS = (
    failing, dying, padded, counted, latent_stock, head_offset, layer_number, norm_gradient, received_slots,
)  # fmt: skip


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    at_the_end = {function.__name__: function for function in ALTERATIONS}[os.environ["ALTERATION"]]()
    try:
        pretrain_gpt_s2.main()  # ends with SystemExit under --exit-interval
    finally:
        if at_the_end:
            at_the_end()


if __name__ == "__main__":
    main()
