"""Command lines that refusals/unproven.py refuses, as refusal_cases.py has them of the other refusals."""

from __future__ import annotations

from tests.megatron.refusal_cases import (
    CP2,
    ENGINE_GRAPHS,
    FSDP2,
    GRAPHS,
    MEGATRON_FSDP,
    OFFLOAD,
    OVERLAPPED,
    PADDED,
    ROUTERS,
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
        "failed on a GPU with S2 attention; use --cuda-graph-modules attn moe_router, or",
    ),
    "cuda_graph_rank_capacity": (
        dict(
            flags={
                **WHOLE_ITERATIONS,
                "--num-experts": "4",
                "--moe-token-dispatcher-type": "flex",
                "--moe-flex-dispatcher-backend": "hybridep",
                "--moe-expert-rank-capacity-factor": "1.5",
            },
        ),
        "has not been run with S2 attention; use --moe-expert-capacity-factor",
    ),
    "cuda_graph_engine_offload": (
        dict(flags={**ENGINE_GRAPHS, **OFFLOAD}),
        "(cudaErrorStreamCaptureUnjoined); use --cuda-graph-impl none, or remove --fine-grained-activation-offloading",
    ),
    "cuda_graph_stages": (
        dict(flags={**GRAPHS, "--pipeline-model-parallel-size": "2"}, world_size=2),
        "--pipeline-model-parallel-size 2 failed on two GPUs",
    ),
    "cuda_graph_engine_cp": (
        dict(flags={**ENGINE_GRAPHS, **CP2}, world_size=2),
        "--context-parallel-size 2 failed on two GPUs with S2 attention; use --cuda-graph-impl local, or",
    ),
    "cuda_graph_fsdp": (
        dict(flags={**WHOLE_ITERATIONS, **MEGATRON_FSDP}, connections="8"),
        "on two GPUs with S2 attention; use --cuda-graph-impl none, or remove --use-",
    ),
    "cuda_graph_overlapped_experts": (
        dict(flags={**ENGINE_GRAPHS, **OVERLAPPED, **ROUTERS}, world_size=2, connections="8"),
        "with S2 attention; use --cuda-graph-impl none, or remove --overlap-moe-expert-parallel-comm",
    ),
}

# Other ways to one of them, as ALSO_REFUSED there.
ALSO_UNPROVEN = {
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
    "graphs_with_torch_fsdp2": ("cuda_graph_fsdp", dict(flags={**WHOLE_ITERATIONS, **FSDP2}, connections="8")),
    "graphs_of_whole_iterations_overlapped": (
        "cuda_graph_overlapped_experts",
        dict(flags={**WHOLE_ITERATIONS, **OVERLAPPED, **PADDED}, world_size=2, connections="8"),
    ),
}
