"""pretrain_gpt_s2.py that says at its end, as one line of JSON after "watched: ", what this rank did: CUDA graphs
replayed, S2 core attentions called from Python (a replayed graph calls none), schedule plans made, and which class
shards the model. With LIFT_UNPROVEN_REFUSALS=1 in the environment it tries what refusals/unproven.py refuses."""

import json
import os


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    import megatron.training.training as training
    import torch

    from s2_megatron.megatron.model.core_attention import S2CoreAttention
    from tests.megatron.lifted import LIFT_UNPROVEN, lift_unproven_refusals
    from tests.megatron.without_gpt import HAS_GPT_MODEL

    if os.environ.get(LIFT_UNPROVEN) == "1":
        lift_unproven_refusals()
    counted = {"graph_replays": 0, "s2_calls": 0, "schedule_plans": 0, "wrapper": None}

    def count(owner, method, name):
        function = getattr(owner, method)

        def counting(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        setattr(owner, method, counting)

    count(torch.cuda.CUDAGraph, "replay", "graph_replays")
    count(S2CoreAttention, "forward", "s2_calls")
    if HAS_GPT_MODEL:
        from megatron.core.models.gpt.gpt_model import GPTModel

        count(GPTModel, "build_schedule_plan", "schedule_plans")
    setup = training.setup_model_and_optimizer

    def noting_setup(*args, **kwargs):
        model, *rest = setup(*args, **kwargs)
        counted["wrapper"] = type(model[0]).__name__.removesuffix("V1")  # of Megatron-FSDP in Megatron 0.20
        return model, *rest

    training.setup_model_and_optimizer = noting_setup
    pretrain_gpt_s2.main()
    print("\nwatched:", json.dumps(counted), flush=True)


if __name__ == "__main__":
    main()
