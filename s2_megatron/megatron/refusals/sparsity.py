"""Refused once the sparsity of the layers is known: another softmax scale, exchanges and dense cores that the layers
cannot have."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from s2_megatron.config.sparsity import ResolvedSparsity, joined_layers
from s2_megatron.context_parallel.document_plan import why_not
from s2_megatron.context_parallel.plan import check_block_count, check_comm_type
from s2_megatron.megatron.model.dense_core import resolve_dense_core
from s2_megatron.megatron.refusals.refusal import listed
from s2_megatron.megatron.settings import S2Run


def refuse_layers(args: Namespace, run: S2Run) -> None:
    """Raises ValueError when the layers cannot be computed as the flags say: the dense ones (--s2-dense-core), and with
    context parallelism the S2 layers (--s2-cp-comm-type).

    Dense layers are not looked at for their exchange: whether they follow that flag depends on what computes them;
    report_context_parallel looks then.
    """
    settings, size = run.settings, args.context_parallel_size
    found = []

    def check(function: Callable, *arguments, **named):
        try:
            return function(*arguments, **named)
        except ValueError as error:
            return found.append(str(error))

    names = ("transformer_impl", "context_parallel_size", "multi_latent_attention")
    core = check(resolve_dense_core, settings, **{name: getattr(args, name) for name in names})
    if size > 1:
        layers = enumerate(run.sparsity.all_layers)
        used = {settings.comm_type(index) for index, layer in layers if layer.pattern is not None}
        kv_heads = max(1, run.sparsity.num_kv_heads // args.tensor_model_parallel_size)
        for comm_type in sorted(used):
            check(check_comm_type, comm_type, kv_heads, size)
        if settings.packed:
            found += _sparse_and_packed(run, dense_by_s2=core is not None and core[0] == "s2")
        if used - {"a2a"} and not settings.packed:
            check(check_block_count, args.seq_length, size, run.sparsity.block_size)
    if found:
        raise ValueError(listed(found))


def _sparse_and_packed(run: S2Run, dense_by_s2: bool) -> list[str]:
    """What is wrong with layers of S2's kernels that have packed documents and the exchange `sparse`. dense_by_s2:
    whether they compute the dense layers, too."""
    layers = [
        index
        for index, layer in enumerate(run.sparsity.all_layers)
        if run.settings.comm_type(index) == "sparse"
        and (dense_by_s2 if layer.pattern is None else why_not(layer.pattern))
    ]
    if not layers:
        return []
    return [
        "--s2-cp-comm-type sparse with packed documents (--sft, --dataloader-inter-document-masking) takes windows and "
        "sinks; strides, masks, dense heads and layers see keys all over a document: nearly all would travel (layers "
        f"from 0: {joined_layers([str(layer) for layer in layers])}); use --s2-cp-comm-type all_gather, or a2a, for "
        "all layers or for these (one word a layer)"
    ]


def refuse_softmax_scale(args: Namespace, sparsity: ResolvedSparsity) -> None:
    """Raises ValueError when something else than the YAML already set another softmax scale for the model, or sets one
    whatever the YAML says."""
    if args.multi_latent_attention and (sparsity.softmax_scale or getattr(args, "softmax_scale", None)) is not None:
        raise ValueError(
            "--s2-config: softmax_scale is set, but --multi-latent-attention computes its own (from --qk-head-dim, "
            "--qk-pos-emb-head-dim and --mscale-all-dim) in every layer; remove softmax_scale from the YAML or the "
            "script"
        )
    if sparsity.softmax_scale is None:
        return
    source, other = None, None
    if getattr(args, "softmax_scale", None) is not None:
        source, other = "args.softmax_scale", args.softmax_scale
    elif args.use_mup:
        # As TransformerConfig computes it.
        base = 1.0 if args.mup_base_head_dim is None else args.mup_base_head_dim**0.5
        source, other = "--use-mup", base / args.kv_channels**args.mup_attn_scale_power
    if source is not None and other != sparsity.softmax_scale:
        raise ValueError(
            f"--s2-config: softmax_scale is {sparsity.softmax_scale:g} in the YAML and {other:g} by {source}; one "
            "model has one scale, so remove one of the two"
        )
