"""Command lines that refusals/unproven.py refuses, as refusal_cases.py has them of the other refusals."""

from __future__ import annotations

from tests.megatron.refusal_cases import (
    CP2,
    ENGINE_GRAPHS,
    GRAPHS,
    MEGATRON_FSDP,
    OFFLOAD,
    OVERLAPPED,
    PADDED,
    ROUTERS,
    SAVED,
    WHOLE_ITERATIONS,
)

# For every refusal of unproven.py, as CASES in refusal_cases.py.
UNPROVEN = {
    "cuda_graph_local_experts": (
        dict(flags={**GRAPHS, **ROUTERS}),
        "--num-experts failed on a GPU",
    ),
    "overlap_dispatch_backward_with_experts_wgrad": (
        dict(
            flags={**OVERLAPPED, "--overlap-dispatch-backward-with-experts-wgrad": None},
            without=["--overlap-moe-expert-parallel-comm"],
            world_size=2,
        ),
        "remove --overlap-dispatch-backward-with-experts-wgrad",
    ),
    "cuda_graph_held_experts": (
        dict(flags={**ENGINE_GRAPHS, **PADDED}),
        "or --moe-expert-rank-capacity-factor) has not been run on a GPU with S2 attention; use --cuda-graph-impl",
    ),
    "cuda_graph_engine_offload": (
        dict(flags={**ENGINE_GRAPHS, **OFFLOAD}),
        "(cudaErrorStreamCaptureUnjoined); use --cuda-graph-impl none, or remove --fine-grained-activation-offloading",
    ),
    "cuda_graph_offload": (
        dict(flags={**WHOLE_ITERATIONS, "--cpu-offloading-num-layers": "1"}),
        "full_iteration with --cpu-offloading-num-layers has not been run on a GPU with S2 attention; use",
    ),
    "cuda_graph_stages": (
        dict(flags={**GRAPHS, "--pipeline-model-parallel-size": "2"}, world_size=2),
        "--pipeline-model-parallel-size 2 has not been run on GPUs",
    ),
    "cuda_graph_engine_cp": (
        dict(flags={**ENGINE_GRAPHS, **CP2}, world_size=2),
        "use --cuda-graph-impl local, or full_iteration, with --s2-cp-comm-type sparse",
    ),
    "cuda_graph_cp_comm_type": (
        dict(flags={**GRAPHS, **CP2, "--s2-cp-comm-type": "a2a"}, world_size=2),
        "has not been run on GPUs; use --s2-cp-comm-type sparse, or --cuda-graph-impl none",
    ),
    "cuda_graph_fsdp": (
        dict(flags={**WHOLE_ITERATIONS, **MEGATRON_FSDP}, connections="8"),
        "full_iteration with --use-megatron-fsdp has not been run on GPUs",
    ),
    "cuda_graph_overlapped_experts": (
        dict(flags={**ENGINE_GRAPHS, **OVERLAPPED, **ROUTERS}, world_size=2, connections="8"),
        "transformer_engine with --overlap-moe-expert-parallel-comm has not been run on GPUs",
    ),
    "overlapped_experts_fsdp": (
        dict(flags={**OVERLAPPED, **MEGATRON_FSDP}, world_size=2, connections="8"),
        "--overlap-moe-expert-parallel-comm with --use-megatron-fsdp has not been run",
    ),
    "megatron_fsdp_checkpoint": (
        # Without the optimizer's state, whose refusal without Transformer Engine would be a second one.
        dict(flags={**MEGATRON_FSDP, **SAVED, "--no-save-optim": None}, connections="8"),
        "use --use-distributed-optimizer instead of --use-megatron-fsdp",
    ),
}

# Other ways to one of them, as ALSO_REFUSED there.
ALSO_UNPROVEN = {
    "megatron_fsdp_loaded": (
        "megatron_fsdp_checkpoint",
        dict(flags={**MEGATRON_FSDP, "--load": "run", "--no-load-optim": None}, connections="8"),
    ),
    "graphs_of_whole_iterations_rank_capacity": (
        "cuda_graph_held_experts",
        dict(
            flags={
                **WHOLE_ITERATIONS,
                "--num-experts": "4",
                "--moe-token-dispatcher-type": "flex",
                "--moe-flex-dispatcher-backend": "hybridep",
                "--moe-expert-rank-capacity-factor": "1.5",
            },
        ),
    ),
    "graphs_of_moe_preprocess": (
        "cuda_graph_held_experts",
        dict(
            flags={
                **ENGINE_GRAPHS,
                "--num-experts": "4",
                "--cuda-graph-modules": ["attn", "moe_router", "moe_preprocess"],
            }
        ),
    ),
    "graphs_of_local_layers_with_padded_experts": ("cuda_graph_local_experts", dict(flags={**GRAPHS, **PADDED})),
    "graphs_of_virtual_stages": (
        "cuda_graph_stages",
        dict(
            flags={
                **WHOLE_ITERATIONS,
                "--pipeline-model-parallel-size": "2",
                "--num-layers-per-virtual-pipeline-stage": "1",
            },
            world_size=2,
        ),
    ),
    "graphs_of_whole_iterations_all_gather": (
        "cuda_graph_cp_comm_type",
        dict(flags={**WHOLE_ITERATIONS, **CP2, "--s2-cp-comm-type": "all_gather"}, world_size=2),
    ),
}
