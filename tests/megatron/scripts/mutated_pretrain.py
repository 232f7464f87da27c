"""pretrain_gpt_s2.py with one deliberate mistake, named by MUTATION: the parallel tests must see it.

head_offset: every tensor-parallel rank takes the heads of rank 0. layer_number: every pipeline stage counts its layers
from 0 (of a HybridModel its attention layers). norm_gradient: under sequence parallelism the norms' gradients are not
added up over the ranks. received_slots: blocks received from other context-parallel ranks are taken for one another.
"""

import dataclasses
import os


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from s2_megatron.context_parallel import attention as context_parallel
    from s2_megatron.megatron import hybrid_specs, layer_specs
    from s2_megatron.megatron.model import check as model_check
    from s2_megatron.megatron.model import core_attention, norms
    from s2_megatron.patterns.ranges import RangePattern

    mutation = os.environ["MUTATION"]
    if mutation == "head_offset":
        slice_of = RangePattern.tensor_parallel_slice
        RangePattern.tensor_parallel_slice = lambda self, rank, size: slice_of(self, 0, size)
    elif mutation == "layer_number":
        global_indices = layer_specs.global_layer_indices
        attention_layer, built = hybrid_specs.HybridAttentionLayer.__init__, []

        def of_local_order(self, *args, by_place, layer_number, **named):
            place = sorted(by_place)[len(built)]
            built.append(self)
            attention_layer(
                self, *args, by_place={layer_number - 1: by_place[place]}, layer_number=layer_number, **named
            )

        hybrid_specs.HybridAttentionLayer.__init__ = of_local_order
        layer_specs.global_layer_indices = lambda *args: list(range(len(global_indices(*args))))
        # Without what sees it sooner, so that the comparison of losses stands alone.
        model_check.check_model = lambda *args: None
        build = core_attention.S2CoreAttention.__init__
        core_attention.S2CoreAttention.__init__ = lambda self, *args, layer_index=None, **kwargs: build(
            self, *args, **kwargs
        )
    elif mutation == "norm_gradient":
        norm = norms.sequence_parallel_norm

        def forgetful_norm(*args, **kwargs):
            module = norm(*args, **kwargs)
            module.weight.sequence_parallel = False
            return module

        norms.sequence_parallel_norm = forgetful_norm
    elif mutation == "received_slots":
        make_plan = context_parallel.make_plan

        def mistaken_plan(*args):
            plan = make_plan(*args)
            slots = plan.remote_slot.copy()
            slots[slots >= 0] = slots[slots >= 0][::-1]
            return dataclasses.replace(plan, remote_slot=slots)

        context_parallel.make_plan = mistaken_plan
    else:
        raise ValueError(f"MUTATION={mutation}; expected head_offset, layer_number, norm_gradient or received_slots")
    pretrain_gpt_s2.main()


if __name__ == "__main__":
    main()
