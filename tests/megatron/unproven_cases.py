"""Command lines that refusals/unproven.py refuses, as refusal_cases.py has them of the other refusals."""

from __future__ import annotations

from tests.megatron.graph_cases import PREPROCESS
from tests.megatron.refusal_cases import (
    ENGINE_GRAPHS,
    ENGINE_MODEL,
    GRAPHS,
    LATENT,
    OFFLOAD,
    OVERLAPPED,
    PADDED,
    ROUTERS,
    WHOLE_ITERATIONS,
)

RANK_CAPACITY = {
    "--num-experts": "4",
    "--moe-token-dispatcher-type": "flex",
    "--moe-flex-dispatcher-backend": "hybridep",
    "--moe-expert-rank-capacity-factor": "1.5",
}

# For every refusal of unproven.py, as CASES in refusal_cases.py.
UNPROVEN = {
    "mla_transformer_engine": (
        dict(
            flags={**LATENT, **ENGINE_MODEL, "--pipeline-model-parallel-size": "2"},
            without=["--group-query-attention"],
            world_size=2,
        ),
        "; docs/validation.md has what has; give --rope-type rope --no-rope-fusion, leave out or change the rest, or",
    ),
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
    "cuda_graph_moe_preprocess": (
        dict(flags={**ENGINE_GRAPHS, **OVERLAPPED, **PREPROCESS}, world_size=2, connections="8"),
        "has not been run with S2 attention; use --cuda-graph-modules attn moe_router",
    ),
    "cuda_graph_rank_capacity": (
        dict(flags={**WHOLE_ITERATIONS, **RANK_CAPACITY}),
        "has not been run with S2 attention; use --moe-expert-capacity-factor",
    ),
    "cuda_graph_engine_offload": (
        dict(flags={**ENGINE_GRAPHS, **OFFLOAD}),
        "(cudaErrorStreamCaptureUnjoined); use --cuda-graph-impl none, or remove --fine-grained-activation-offloading",
    ),
}

# Other ways to one of them, as ALSO_REFUSED there.
ALSO_UNPROVEN = {
    "latent_engine_offsets": (
        "mla_transformer_engine",
        dict(
            flags={**LATENT, **ENGINE_MODEL, "--no-rope-fusion": None, "--softmax-type": "learnable"},
            without=["--group-query-attention"],
        ),
    ),
    "latent_engine_experts": (
        "mla_transformer_engine",
        dict(
            flags={**LATENT, **ENGINE_MODEL, "--no-rope-fusion": None, "--num-experts": "4"},
            without=["--group-query-attention"],
        ),
    ),
    "latent_engine_yarn": (
        "mla_transformer_engine",
        dict(
            flags={**LATENT, **ENGINE_MODEL, "--no-rope-fusion": None, "--rope-type": "yarn"},
            without=["--group-query-attention"],
        ),
    ),
    "engine_graphs_of_padded_moe_preprocess": (
        "cuda_graph_moe_preprocess",
        dict(flags={**ENGINE_GRAPHS, **OVERLAPPED, **PADDED, **PREPROCESS}, world_size=2, connections="8"),
    ),
    "graphs_of_local_layers_with_padded_experts": ("cuda_graph_local_experts", dict(flags={**GRAPHS, **PADDED})),
    "engine_graphs_of_rank_capacity": ("cuda_graph_rank_capacity", dict(flags={**ENGINE_GRAPHS, **RANK_CAPACITY})),
    "engine_graphs_of_moe_preprocess_with_rank_capacity": (
        "cuda_graph_rank_capacity",
        dict(flags={**ENGINE_GRAPHS, **RANK_CAPACITY, **PREPROCESS}),
    ),
}
