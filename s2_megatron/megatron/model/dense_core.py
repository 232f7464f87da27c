"""What computes the dense layers of a model with S2 layers: Megatron's own core attention, or S2's with a dense
pattern."""

from __future__ import annotations

from s2_megatron.megatron.model.engine import engine_refuses
from s2_megatron.megatron.settings import S2Settings

# Megatron's local core attention materialises the s x s scores; up to this length "auto" still takes it.
STOCK_LOCAL_LENGTH = 4096


def resolve_dense_core(
    settings: S2Settings, *, transformer_impl: str, context_parallel_size: int, multi_latent_attention: bool = False
) -> tuple[str, str]:
    """('stock' or 's2', the reason in words). transformer_impl, context_parallel_size, multi_latent_attention:
    Megatron's.

    Raises ValueError for --s2-dense-core stock where Megatron's own attention cannot run.
    """
    choice, packed, seq_length = settings.dense_core, settings.packed, settings.seq_length
    if choice == "s2":
        return "s2", "--s2-dense-core s2"
    if transformer_impl == "transformer_engine":
        obstacle = engine_refuses(settings.softmax_type, packed, context_parallel_size, settings.dense_comm_types)
        if obstacle is not None:
            if choice == "stock":
                raise ValueError(
                    f"--s2-dense-core stock with {obstacle}: Transformer Engine's attention refuses that; use "
                    "--s2-dense-core s2 or auto"
                )
            return "s2", f"Transformer Engine's attention does not take {obstacle}"
        if packed and context_parallel_size > 1 and settings.packed_cut == "sequence":
            if choice == "stock":
                raise ValueError(
                    f"--s2-dense-core stock with packed rows that are cut over context_parallel_size="
                    f"{context_parallel_size} ranks as one sequence: Transformer Engine's attention expects every "
                    "document cut by itself; use --s2-dense-core s2 or auto"
                )
            reason = "does not take packed rows cut as one sequence (context parallelism)"
            return "s2", f"Transformer Engine's attention {reason}"
        return "stock", "Transformer Engine's attention" if choice == "auto" else "--s2-dense-core stock"
    obstacles = []
    if context_parallel_size > 1:
        obstacles.append(f"context_parallel_size={context_parallel_size}")
    if multi_latent_attention:
        obstacles.append("--multi-latent-attention, whose head dims differ")
    if packed:
        obstacles.append("packed documents (--sft, --dataloader-inter-document-masking)")
    if choice == "stock":
        if obstacles:
            raise ValueError(
                f"--s2-dense-core stock with --transformer-impl local and {' and '.join(obstacles)}: Megatron's local "
                "attention refuses that; use --s2-dense-core auto or s2, or install Transformer Engine and use "
                "--transformer-impl transformer_engine"
            )
        return "stock", "--s2-dense-core stock"
    if seq_length is not None and seq_length > STOCK_LOCAL_LENGTH:
        obstacles.append(f"seq_length={seq_length} > {STOCK_LOCAL_LENGTH}, where its memory grows with the square")
    if obstacles:
        return "s2", f"Megatron's local attention does not suit {' and '.join(obstacles)}"
    return "stock", f"Megatron's local attention suits seq_length={seq_length}, one document a sample"
