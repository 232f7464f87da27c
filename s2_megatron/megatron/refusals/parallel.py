"""Refused: ways to spread a model over ranks that S2-Attention does not honour."""

from __future__ import annotations

from argparse import Namespace

from s2_megatron.megatron.refusals.refusal import Refusal, is_set
from s2_megatron.megatron.settings import packed_cut


def _documents_shift_labels_over_ranks(args: Namespace) -> bool:
    return bool(args.context_parallel_size > 1 and packed_cut(args) == "sequence" and args.mtp_num_layers)


def _mtp_targets_differ_over_ranks(args: Namespace) -> bool:
    masked = args.eod_mask_loss or args.sft or args.s2_loss_from_token is not None
    return bool(args.context_parallel_size > 1 and args.mtp_num_layers and masked and not args.calculate_per_token_loss)


REFUSALS = (
    Refusal(
        "s2_cp_mtp_masks",
        _mtp_targets_differ_over_ranks,
        "--mtp-num-layers with --context-parallel-size {args.context_parallel_size} and a mask of the loss "
        "(--eod-mask-loss, --sft, --s2-loss-from-token): Megatron divides the MTP loss of each rank by that rank's own "
        "number of targets",
        "add --calculate-per-token-loss, or use --context-parallel-size 1",
    ),
    Refusal(
        "s2_cp_mtp",
        _documents_shift_labels_over_ranks,
        "--mtp-num-layers with --dataloader-inter-document-masking and --context-parallel-size "
        "{args.context_parallel_size}: Megatron shifts the labels by documents, and the row was cut as one sequence",
        "use --context-parallel-size 1, or remove --mtp-num-layers",
    ),
    Refusal(
        "hierarchical_context_parallel_sizes",
        is_set("hierarchical_context_parallel_sizes"),
        "--hierarchical-context-parallel-sizes: S2 layers exchange blocks among all context-parallel ranks at once",
        "remove --hierarchical-context-parallel-sizes and use --cp-comm-type p2p for dense layers",
    ),
    *(
        Refusal(
            f"{name}_context_parallel",
            is_set(f"{name}_context_parallel"),
            f"--{name}-context-parallel (dynamic context parallelism) changes the ranks from batch to batch, and S2 "
            "plans the exchange once",
            f"remove --{name}-context-parallel",
        )
        for name in ("hybrid", "dynamic")
    ),  # Megatron 0.19's name, and the one of its development branch
    Refusal(
        "megatron_fsdp_version",
        lambda args: bool(args.use_megatron_fsdp and getattr(args, "megatron_fsdp_version", 1) != 1),
        "--megatron-fsdp-version {args.megatron_fsdp_version} has not been run with S2 attention",
        "remove --megatron-fsdp-version, or use --use-distributed-optimizer instead of --use-megatron-fsdp",
    ),  # of Megatron's development branch
)
