"""Refused: settings that change what attention computes, and settings that read the attention's inside."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec

from s2_megatron.megatron.refusals.refusal import ATTENTION_MASK_SEQ_LENGTH, Refusal, is_set

# Elements that Transformer Engine's fused RoPE can address: its kernels count them in 32 bits (fused_rope.cu of 2.20,
# `int offset_block`).
FUSED_ROPE_ELEMENTS = 2**31


def fused_rope_elements(args: Namespace) -> int:
    """Of the tensor whose rows hold the queries and keys that a rank's fused RoPE reads: its offsets go up to there."""
    ranks = args.tensor_model_parallel_size
    kv_heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if args.qk_layernorm:  # queries and keys are tensors of their own then, the queries the longer one
        heads = args.num_attention_heads // ranks
    else:  # a rank with a part of a KV head takes it from a row of all heads
        heads = args.num_attention_heads * (2 if args.attention_output_gate else 1) + 2 * kv_heads
        heads = heads // ranks if kv_heads >= ranks else heads
    return args.seq_length // args.context_parallel_size * args.micro_batch_size * heads * args.kv_channels


def _fused_softmax_is_missing(args: Namespace) -> bool:
    wanted = (
        args.masked_softmax_fusion
        and (args.bf16 or args.fp16)
        and args.transformer_impl == "local"
        and args.s2_dense_core != "s2"
    )
    return wanted and find_spec("scaled_masked_softmax_cuda") is None


REFUSALS = (
    Refusal(
        "reset_attention_mask",
        is_set("reset_attention_mask"),
        "--reset-attention-mask puts document boundaries into an attention mask, which S2 attention does not read",
        "use --dataloader-inter-document-masking, which packs the documents (cu_seqlens)",
    ),
    Refusal(
        "create_attention_mask_in_dataloader",
        lambda args: args.create_attention_mask_in_dataloader and args.seq_length > ATTENTION_MASK_SEQ_LENGTH,
        "Megatron's dataloader would build a [{args.micro_batch_size}, 1, {args.seq_length}, {args.seq_length}] "
        "attention mask for every microbatch, which causal attention does not need",
        "add --no-create-attention-mask-in-dataloader",
    ),
    Refusal(
        "apply_rope_fusion",
        lambda args: args.apply_rope_fusion and fused_rope_elements(args) > FUSED_ROPE_ELEMENTS,
        "fused RoPE of {elements} elements (--seq-length / --context-parallel-size x --micro-batch-size x the width of "
        f"a row that holds a rank's queries and keys), but Transformer Engine's kernel addresses {FUSED_ROPE_ELEMENTS} "
        "and would read other memory for the last tokens, without an error",
        "add --no-rope-fusion, or take a larger --context-parallel-size",
        lambda args: {"elements": fused_rope_elements(args)},
    ),
    *(
        Refusal(
            name,
            is_set(name),
            f"{name}=True: S2 attention computes in bf16, fp16 or fp32 (fp8 linear layers are fine)",
            f"set {name}=False",
        )
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention")
    ),
    *(
        Refusal(
            name,
            is_set(name),
            f"{flag} needs the largest attention logit, which S2 attention does not keep",
            f"remove {flag}",
        )
        for name, flag in (("qk_clip", "--qk-clip"), ("log_max_attention_logit", "--log-max-attention-logit"))
    ),
    Refusal(
        "batch_invariant_mode",
        is_set("batch_invariant_mode"),
        "--batch-invariant-mode demands FlashAttention 3 or 4 in every layer",
        "remove --batch-invariant-mode",
    ),
    Refusal(
        "masked_softmax_fusion",
        _fused_softmax_is_missing,
        "--transformer-impl local in 16 bits: Megatron's dense layers want the fused softmax of NVIDIA Apex, which is "
        "not installed",
        "add --no-masked-softmax-fusion, or use --s2-dense-core s2",
        of_machine=True,
    ),
)
