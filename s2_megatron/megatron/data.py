"""What Megatron's training loop asks of a GPT: datasets, batches, one forward step with its loss (loss.py).

Shapes: b microbatch, s sequence length, t = b*s tokens of a packed microbatch, n documents in it.

A packed batch (`--sft`, `--dataloader-inter-document-masking`) is one row of t tokens with the documents' borders in
`PackedSeqParams`; every pipeline stage reads it, because every layer needs the borders. Over c context-parallel ranks
Megatron cuts the row in zigzag: every document by itself for --sft, whose documents are padded for it, the whole row
for inter-document masking.
"""

from __future__ import annotations

import json
from functools import partial
from typing import NamedTuple

import megatron.core.utils as megatron_utils
import megatron.training.training as training_loop
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from s2_megatron.context_parallel.dense import cut_order
from s2_megatron.context_parallel.documents import keep_borders
from s2_megatron.megatron.loss import language_model_loss
from s2_megatron.megatron.model.core_attention import PackedAcrossRanks
from s2_megatron.megatron.records.position_loss import packed_positions, position_loss
from s2_megatron.megatron.settings import is_packed, packed_cut
from s2_megatron.ops.layout import PackedSequence

_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
_DOCUMENT_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


class GPTBatch(NamedTuple):
    """One microbatch as this rank sees it; a field is None where this pipeline stage has no use for it."""

    tokens: torch.Tensor | None = None  # int64 [b, s], packed [1, t]
    position_ids: torch.Tensor | None = None  # int64, like tokens
    labels: torch.Tensor | None = None  # int64, like tokens
    loss_mask: torch.Tensor | None = None  # fp32, like tokens
    attention_mask: torch.Tensor | None = None  # bool [b, 1, s, s], only with --create-attention-mask-in-dataloader
    packed: PackedSeqParams | None = None  # the documents' borders, int32 [n + 1]
    positions: torch.Tensor | None = None  # int64, like labels: in the document; only with --s2-position-loss


def _stage_has_tokens(config, vp_stage: int | None) -> bool:
    """Whether the pipeline stage embeds tokens, computes a loss, or predicts several tokens ahead (MTP)."""
    return is_first_or_last_pipeline_stage(vp_stage) or _stage_has_mtp(config, vp_stage)


def _stage_has_mtp(config, vp_stage: int | None) -> bool:
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _packed_seq_params(batch: dict, args) -> PackedSeqParams:
    borders, padded = (
        batch[key] if batch[key] is None else batch[key].squeeze(0) for key in ("cu_seqlens", "cu_seqlens_padded")
    )
    # Megatron's FLOP count of a packed batch: the real tokens, without padding. Looked up at call time, so that a
    # wrapper counts too.
    training_loop.update_seqlen_stats_from_cu_seqlens(borders)
    starts = (borders if padded is None else padded).to(torch.int32)
    padded = None if padded is None else starts
    longest = int(batch["max_seqlen"].item())
    if args.context_parallel_size > 1 and "sparse" in args.s2_cp_comm_type:
        keep_borders(starts)  # here, right behind another wait; a layer would wait for what is enqueued by then
    if args.context_parallel_size > 1 and packed_cut(args) == "sequence":
        tokens = args.micro_batch_size * args.seq_length
        row = torch.arange(2, dtype=torch.int32, device=starts.device) * tokens
        return PackedAcrossRanks(
            qkv_format="thd",
            cu_seqlens_q=row,
            cu_seqlens_kv=row,
            max_seqlen_q=tokens,
            max_seqlen_kv=tokens,
            tokens_per_sample=args.seq_length,
            documents=PackedSequence(starts, longest),
        )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if batch["local_cp_size"] is None else int(batch["local_cp_size"].item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=args.seq_length,
    )


def next_batch(data_iterator, config, vp_stage: int | None = None) -> GPTBatch:
    """The next microbatch. Tensor-parallel rank 0 reads it and broadcasts it within its group.

    data_iterator: None on the ranks that do not read. config: the model's TransformerConfig. vp_stage: virtual pipeline
    stage.
    """
    args = get_args()
    packed = is_packed(args)
    has_tokens = _stage_has_tokens(config, vp_stage)
    if not has_tokens and not packed:
        return GPTBatch()

    sample = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        read = next(data_iterator)
        for key in _TOKEN_KEYS + _DOCUMENT_KEYS:
            tensor = read.get(key)
            sample[key] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        sample,
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_stage_has_mtp(config, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not has_tokens:
        return GPTBatch(packed=_packed_seq_params(batch, args))
    if args.s2_loss_from_token is not None and batch["labels"] is not None:
        batch["loss_mask"] = batch["loss_mask"] * (batch["labels"] >= args.s2_loss_from_token)
    positions = None
    if position_loss() is not None and batch["labels"] is not None:
        # In the place of the labels, so that they are cut in the same way.
        alone = dict.fromkeys(_TOKEN_KEYS) | {key: batch[key] for key in _DOCUMENT_KEYS if key in batch}
        positions = _cut_over_ranks({**alone, "labels": _positions(batch)}, args)["labels"]
    return _as_gpt_batch(_cut_over_ranks(batch, args), args)._replace(positions=positions)


def _positions(batch: dict) -> torch.Tensor:
    """The position of every label's query token in its document, int64, like the labels before they are cut."""
    labels, borders = batch["labels"], batch["cu_seqlens"]
    if borders is None:
        return torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    if batch["cu_seqlens_padded"] is not None:
        borders = batch["cu_seqlens_padded"]
    return packed_positions(borders.squeeze(0), labels.numel()).view_as(labels)


def _cut_over_ranks(batch: dict, args) -> dict:
    """The part of the batch that this context-parallel rank has."""
    if (
        is_packed(args)
        and args.context_parallel_size > 1
        and packed_cut(args) == "document"
        and megatron_utils.tex is None
    ):
        return _with_documents_cut(batch, args)
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=packed_cut(args) == "sequence",
    )


def _as_gpt_batch(batch: dict, args) -> GPTBatch:
    return GPTBatch(
        tokens=batch["tokens"],
        position_ids=batch["position_ids"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        attention_mask=batch["attention_mask"],
        packed=None if batch["cu_seqlens"] is None else _packed_seq_params(batch, args),
    )


def _with_documents_cut(batch: dict, args) -> dict:
    """Every document cut by itself, as Transformer Engine's thd_get_partitioned_indices does it, where that is not
    installed."""
    borders = batch["cu_seqlens"] if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"]
    group = mpu.get_context_parallel_group()
    tokens = args.micro_batch_size * args.seq_length
    rows = cut_order(borders.squeeze(0), tokens, group.size()).argsort().chunk(group.size())[group.rank()]
    cut = {
        key: batch[key].index_select(1, rows)
        for key in ("tokens", "labels", "loss_mask", "position_ids")
        if batch[key] is not None
    }
    return batch | cut


def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    """Run one microbatch through the model.

    Returns (output tensor, function from it to the loss); with return_schedule_plan, which Megatron asks for under
    --overlap-moe-expert-parallel-comm, (schedule plan, the same function).
    """
    args = get_args()
    timers = get_timers()
    straggler_timer = StragglerDetector()

    timers("batch-generator", log_level=2).start()
    with straggler_timer(bdata=True):
        config = get_attr_wrapped_model(model, "config")
        batch = next_batch(data_iterator, config, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()

    inputs = (batch.tokens, batch.position_ids, batch.attention_mask)
    options = dict(labels=batch.labels, loss_mask=batch.loss_mask, packed_seq_params=batch.packed)
    loss_function = partial(language_model_loss, batch.loss_mask, model=model, positions=batch.positions)
    with straggler_timer:
        if return_schedule_plan:
            if not args.overlap_moe_expert_parallel_comm:
                raise ValueError(
                    "overlap_moe_expert_parallel_comm=False, but the schedule asks for a schedule plan; expected True; "
                    "add --overlap-moe-expert-parallel-comm"
                )
            return model.build_schedule_plan(*inputs, **options), loss_function
        output = model(*inputs, **options)
    return output, loss_function


def dataset_config(args) -> GPTDatasetConfig:
    """Megatron's dataset settings from its command line (GPTFIMDatasetConfig with --fim-data)."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    settings = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=build_tokenizer(args),
        # where the data lies
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        sequences_per_dataset=sequences_per_dataset,
        # how it is read
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        object_storage_cache_path=args.object_storage_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        # what a sample holds
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        # to what lengths packed documents are padded
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
        hybrid_context_parallel=args.hybrid_context_parallel,
    )
    if not args.fim_data:
        return GPTDatasetConfig(**settings)
    from megatron.training.datasets.fim_dataset import GPTFIMDatasetConfig

    markers = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    return GPTFIMDatasetConfig(
        **settings,
        fim_extra_tokens=markers,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def _dataset_class(args) -> type:
    if args.sft:
        from megatron.training.datasets.sft_dataset import SFTDataset

        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    if args.fim_data:
        from megatron.training.datasets.fim_dataset import GPTFIMDataset

        return GPTFIMDataset
    return GPTDataset


def datasets_provider(train_valid_test_num_samples, vp_stage: int | None = None):
    """The train, validation and test datasets, each None on ranks that do not read it.

    train_valid_test_num_samples: three numbers of samples. vp_stage: virtual pipeline stage.
    """
    args = get_args()

    def is_read_here() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        return is_packed(args) or _stage_has_tokens(core_transformer_config_from_args(args), vp_stage)

    print_rank_0("> building the train, validation and test datasets ...")
    return BlendedMegatronDatasetBuilder(
        _dataset_class(args), train_valid_test_num_samples, is_read_here, dataset_config(args)
    ).build()


# Tells Megatron to call the provider on every rank rather than on tensor-parallel rank 0 only.
datasets_provider.is_distributed = True


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Those of a pipeline that hold the word embedding: the first, those with MTP layers, the last when it is tied.
    pp_ranks: the global ranks of one pipeline, first stage first."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
