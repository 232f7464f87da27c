"""Command lines with CUDA graphs, refused and accepted, as refusal_cases.py has the others."""

from __future__ import annotations

from tests.megatron.refusal_cases import (
    CP2,
    ENGINE,
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

PP2 = {"--pipeline-model-parallel-size": "2"}
VIRTUAL_STAGES = {**PP2, "--num-layers-per-virtual-pipeline-stage": "1"}
HELD = {"--cuda-graph-modules": ["attn", "moe"]}
PREPROCESS = {"--cuda-graph-modules": ["attn", "moe_router", "moe_preprocess"]}

# For every refusal of graphs, as CASES in refusal_cases.py.
GRAPH_CASES = {
    "cuda_graph_local_layers": (
        dict(flags={"--cuda-graph-impl": "local"}),
        "gradients than the same run without graphs; use "
        "--transformer-impl transformer_engine, or --cuda-graph-impl full_iteration or none",
    ),
    "cuda_graph_experts": (
        dict(flags={**ENGINE_GRAPHS, "--num-experts": "4"}),
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router",
    ),
    "cuda_graph_pipeline": (
        dict(flags={**WHOLE_ITERATIONS, **PP2}, world_size=2),
        "which a graph cannot hold; use --cuda-graph-impl none",
    ),
    "cuda_graph_stages": (
        dict(flags={**GRAPHS, **PP2}, world_size=2),
        "--pipeline-model-parallel-size 2: Megatron frees what a stage has sent (core/pipeline_parallel/schedules.py), "
        "and what comes from such graphs is a view, which it cannot free; use --cuda-graph-impl "
        "transformer_engine or none, or full_iteration with virtual stages",
    ),
    "cuda_graph_fsdp": (
        dict(flags={**WHOLE_ITERATIONS, **FSDP2}, connections="8"),
        "--cuda-graph-impl full_iteration with --use-torch-fsdp2: gradient norms were 0 from the second replay on",
    ),
    "cuda_graph_overlapped_experts": (
        dict(flags={**ENGINE_GRAPHS, **OVERLAPPED, **PADDED}, world_size=2, connections="8"),
        "where one graph holds the whole layer (core/transformer/transformer_layer.py); use --cuda-graph-modules "
        "attn moe_router, or",
    ),
    "cuda_graph_spiky_loss": (
        dict(flags={**WHOLE_ITERATIONS, "--check-for-spiky-loss": None}),
        "remove --check-for-spiky-loss",
    ),
    "cuda_graph_packed": (
        dict(flags={**ENGINE, "--cuda-graph-impl": "local", "--dataloader-inter-document-masking": None}),
        "use --cuda-graph-impl none",
    ),
    "cuda_graph_attention_mask": (
        dict(flags={**ENGINE, "--cuda-graph-impl": "transformer_engine", "--seq-length": "16384"}),
        "use --cuda-graph-impl local, full_iteration or none",
    ),
}

# As ACCEPTED there.
ACCEPTED_GRAPHS = {
    "cuda_graphs": dict(flags={**ENGINE, "--cuda-graph-impl": "local"}),
    "cuda_graphs_long": dict(flags={**ENGINE, "--cuda-graph-impl": "local", "--seq-length": "131072"}),
    "cuda_graphs_of_transformer_engine": dict(
        flags={**ENGINE, "--cuda-graph-impl": "transformer_engine", "--seq-length": "8192"}
    ),
    "cuda_graphs_of_whole_iterations": dict(flags=WHOLE_ITERATIONS),
    "cuda_graphs_of_whole_iterations_padded_experts": dict(flags={**WHOLE_ITERATIONS, **PADDED}),
    "cuda_graphs_of_whole_iterations_offload": dict(
        flags={**ENGINE, **WHOLE_ITERATIONS, **OFFLOAD, "--fine-grained-offloading-max-inflight-offloads": "2"}
    ),
    "cuda_graphs_of_whole_iterations_mtp": dict(flags={**WHOLE_ITERATIONS, "--mtp-num-layers": "1"}),
    "cuda_graphs_of_transformer_engine_mtp": dict(flags={**ENGINE_GRAPHS, "--mtp-num-layers": "1"}),
    "cuda_graphs_context_parallel": dict(flags={**WHOLE_ITERATIONS, "--context-parallel-size": "2"}, world_size=2),
    "cuda_graphs_context_parallel_of_layers": dict(flags={**GRAPHS, **CP2}, world_size=2),
    "cuda_graphs_a2a": dict(flags={**GRAPHS, **CP2, "--s2-cp-comm-type": "a2a"}, world_size=2),
    "cuda_graphs_of_whole_iterations_all_gather": dict(
        flags={**WHOLE_ITERATIONS, **CP2, "--s2-cp-comm-type": "all_gather"}, world_size=2
    ),
    "cuda_graphs_of_transformer_engine_context_parallel": dict(flags={**ENGINE_GRAPHS, **CP2}, world_size=2),
    "cuda_graphs_of_transformer_engine_a2a": dict(
        flags={**ENGINE_GRAPHS, **CP2, "--s2-cp-comm-type": "a2a"}, world_size=2
    ),
    "cuda_graphs_of_transformer_engine_all_gather": dict(
        flags={**ENGINE_GRAPHS, **CP2, "--s2-cp-comm-type": "all_gather"}, world_size=2
    ),
    "cuda_graphs_of_stages": dict(flags={**ENGINE_GRAPHS, **PP2}, world_size=2),
    "cuda_graphs_of_virtual_stages": dict(flags={**WHOLE_ITERATIONS, **VIRTUAL_STAGES}, world_size=2),
    "cuda_graphs_of_whole_iterations_offloaded_layers": dict(
        flags={**ENGINE, **WHOLE_ITERATIONS, "--cpu-offloading-num-layers": "1"}
    ),
    "cuda_graphs_experts": dict(flags={**ENGINE_GRAPHS, **ROUTERS}),
    "cuda_graphs_padded_experts": dict(flags={**ENGINE_GRAPHS, **PADDED}),
    "cuda_graphs_padded_experts_by_name": dict(flags={**ENGINE_GRAPHS, **PADDED, **HELD}),
    "cuda_graphs_preprocess": dict(flags={**ENGINE_GRAPHS, "--num-experts": "4", **PREPROCESS}),
    "cuda_graphs_preprocess_padded": dict(flags={**ENGINE_GRAPHS, **PADDED, **PREPROCESS}),
    "cuda_graphs_overlapped_experts": dict(
        flags={**ENGINE_GRAPHS, **OVERLAPPED, **ROUTERS}, world_size=2, connections="8"
    ),
    "cuda_graphs_of_whole_iterations_overlapped_experts": dict(
        flags={**WHOLE_ITERATIONS, **OVERLAPPED, **PADDED}, world_size=2, connections="8"
    ),
    "cuda_graphs_of_whole_iterations_megatron_fsdp": dict(flags={**WHOLE_ITERATIONS, **MEGATRON_FSDP}, connections="8"),
    "cuda_graphs_mtp": dict(flags={**ENGINE, "--cuda-graph-impl": "local", "--mtp-num-layers": "2"}),
    "cuda_graphs_recompute": dict(
        flags={**ENGINE, "--cuda-graph-impl": "local", "--recompute-granularity": "selective"}
    ),
    "cuda_graphs_of_mlps": dict(
        flags={
            "--cuda-graph-impl": "transformer_engine",
            "--cuda-graph-modules": "mlp",
            "--dataloader-inter-document-masking": None,
        }
    ),
}

# As ALSO_REFUSED there.
ALSO_REFUSED_GRAPHS = {
    "engine_graphs_of_local_layers": (
        "cuda_graph_local_layers",
        dict(flags={"--cuda-graph-impl": "transformer_engine"}),
    ),
    "engine_graphs_of_local_attention": (
        "cuda_graph_local_layers",
        dict(flags={"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": ["attn", "mlp"]}),
    ),
    "graphs_of_whole_iterations_with_experts": (
        "cuda_graph_experts",
        dict(flags={**WHOLE_ITERATIONS, "--num-experts": "4"}),
    ),
    "graphs_of_whole_iterations_packed": (
        "cuda_graph_packed",
        dict(flags={**WHOLE_ITERATIONS, "--dataloader-inter-document-masking": None}),
    ),
    "engine_graphs_of_dropless_experts_by_name": (
        "cuda_graph_experts",
        dict(flags={**ENGINE_GRAPHS, "--num-experts": "4", **HELD}),
    ),
    "graphs_of_virtual_stages_of_layers": (
        "cuda_graph_stages",
        dict(flags={**GRAPHS, **VIRTUAL_STAGES}, world_size=2),
    ),
    "graphs_overlapped_experts_by_name": (
        "cuda_graph_overlapped_experts",
        dict(flags={**ENGINE_GRAPHS, **OVERLAPPED, **PADDED, **HELD}, world_size=2, connections="8"),
    ),
    "graphs_torch_fsdp2_local": (
        "cuda_graph_fsdp",
        dict(flags={**GRAPHS, **FSDP2}, connections="8"),
        "--cuda-graph-impl local with --use-torch-fsdp2: while the backward of a layer is captured (core/transformer/"
        "cuda_graphs.py), FSDP2 gathers the weights on a stream of its own and allocates memory for them, which "
        "CUDA does not permit then; use --cuda-graph-impl none, or --use-distributed-optimizer instead of --use-torch-",
    ),
    "graphs_torch_fsdp2_engine": (
        "cuda_graph_fsdp",
        dict(flags={**ENGINE_GRAPHS, **FSDP2}, connections="8"),
        "--cuda-graph-impl transformer_engine with --use-torch-fsdp2: it puts hooks on every module, and Transformer "
        "Engine captures none that has hooks (its graph.py in 2.20.2), unless it is told of them, which Megatron "
        "does not; use --cuda-graph-impl none, or --use-distributed-optimizer instead of --use-torch-fsdp2",
    ),
    "graphs_torch_fsdp2_whole_iterations": (
        "cuda_graph_fsdp",
        dict(flags={**WHOLE_ITERATIONS, **FSDP2}, connections="8"),
        "norms were 0 from the second replay on: Megatron clears .grad after a step (core/optimizer/optimizer.py), "
        "and FSDP2 sets it in Python, which a replayed graph does not run; use --cuda-graph-impl none, or --use",
    ),
    "graphs_megatron_fsdp_local": (
        "cuda_graph_fsdp",
        dict(flags={**GRAPHS, **MEGATRON_FSDP}, connections="8"),
        "--cuda-graph-impl local with --use-megatron-fsdp: Megatron captures the graphs when finish_grad_sync "
        "(core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py) has put the sharded weights into the modules, "
        "which the hook that gathers a layer's weights does not know (KeyError in param_and_grad_buffer.py); use "
        "--cuda-graph-impl none, or full_iteration with --no-check-for-nan-in-loss-and-grad",
    ),
    "graphs_megatron_fsdp_engine": (
        "cuda_graph_fsdp",
        dict(flags={**ENGINE_GRAPHS, **MEGATRON_FSDP}, connections="8"),
        "--cuda-graph-impl transformer_engine with --use-megatron-fsdp: it puts hooks on every module, and Transformer "
        "Engine captures none that has hooks (its graph.py in 2.20.2), unless it is told of them, which Megatron "
        "does not; use --cuda-graph-impl none, or full_iteration with --no-check-for-nan-in-loss-and-grad",
    ),
    "graphs_megatron_fsdp_of_mlps": (
        "cuda_graph_fsdp",
        dict(flags={**ENGINE_GRAPHS, **MEGATRON_FSDP, "--cuda-graph-modules": "mlp"}, connections="8"),
        "it puts hooks on every module",
    ),
    "engine_graphs_packed": (
        "cuda_graph_packed",
        dict(flags={**ENGINE_GRAPHS, "--dataloader-inter-document-masking": None}),
    ),
}
