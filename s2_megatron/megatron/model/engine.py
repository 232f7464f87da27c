"""What Transformer Engine's attention does not take. Neither Megatron nor torch is imported."""

from __future__ import annotations

from collections.abc import Collection


def engine_refuses(
    softmax_type: str, packed: bool, context_parallel_size: int, comm_types: Collection[str]
) -> str | None:
    """What of a softmax offset Transformer Engine's attention does not take, in words (filters of
    get_attention_backend in its dot_product_attention/utils.py). comm_types: of --cp-comm-type."""
    if softmax_type == "vanilla":
        return None
    if packed:
        return f"--softmax-type {softmax_type} and packed documents (--sft, --dataloader-inter-document-masking)"
    if context_parallel_size > 1 and set(comm_types) != {"a2a"}:
        return (
            f"--softmax-type {softmax_type}, --context-parallel-size {context_parallel_size} and --cp-comm-type "
            f"{' '.join(comm_types)} (only a2a)"
        )
    return None
