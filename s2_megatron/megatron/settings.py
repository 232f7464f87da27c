"""The settings of S2-Attention in one run: what the command line says, read once.

`prepare_s2` makes one S2Settings from Megatron's arguments, `apply_s2` hands it to the layer specs, and every
S2CoreAttention gets it as it is. Two things are not in it, because they have a place already: which blocks a layer
attends (ResolvedSparsity), and whether the backward is deterministic (Megatron's TransformerConfig.deterministic_mode,
which S2CoreAttention reads; nothing else does). RunFlags holds what the command line says of a run's losses and logs.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.ops.api import BACKENDS

DENSE_CORES = ("auto", "stock", "s2")


def is_packed(args: Namespace) -> bool:
    """Whether a sample holds several documents, with their borders (cu_seqlens). args: Megatron's."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def packed_cut(args: Namespace) -> str:
    """How Megatron cuts packed rows over context-parallel ranks: the row as one 'sequence', or each 'document' by
    itself. args: Megatron's."""
    return "sequence" if args.dataloader_inter_document_masking and not args.sft else "document"


def computed_head_dim(transformer) -> int:
    """The head dim that kernels compute with and context parallelism sends: the larger one where keys and values have
    two. transformer: Megatron's TransformerConfig."""
    if not transformer.multi_latent_attention:
        return transformer.kv_channels
    return max(transformer.qk_head_dim + transformer.qk_pos_emb_head_dim, transformer.v_head_dim)


@dataclass(frozen=True)
class S2Settings:
    """How S2-Attention computes; the defaults are those of the command line.

    backend: --s2-backend. dense_core: --s2-dense-core. cp_comm_types: --s2-cp-comm-type, one for all layers or one per
    layer. cp_keep_received: --s2-cp-keep-received. keep_attention_output: --s2-keep-attention-output. seq_length:
    tokens of a training sequence, over all context-parallel ranks; None where that is not known. packed, packed_cut: as
    in the functions of these names. softmax_type, dense_comm_types: Megatron's --softmax-type and --cp-comm-type, which
    decide whether its own dense layers can run.
    Raises ValueError for a backend or a dense core that does not exist.
    """

    backend: str = "auto"
    dense_core: str = "auto"
    cp_comm_types: tuple[str, ...] = ("sparse",)
    cp_keep_received: bool = False
    keep_attention_output: bool = False
    seq_length: int | None = None
    packed: bool = False
    packed_cut: str = "document"
    softmax_type: str = "vanilla"
    dense_comm_types: tuple[str, ...] = ("p2p",)

    def __post_init__(self):
        for name, flag, known in (
            ("backend", "--s2-backend", BACKENDS),
            ("dense_core", "--s2-dense-core", DENSE_CORES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r}; expected one of {', '.join(known)}; set {flag}")

    @classmethod
    def from_args(cls, args: Namespace) -> S2Settings:
        """args: Megatron's, with the flags of add_s2_arguments."""
        return cls(
            backend=args.s2_backend,
            dense_core=args.s2_dense_core,
            cp_comm_types=tuple(args.s2_cp_comm_type),
            cp_keep_received=args.s2_cp_keep_received,
            keep_attention_output=args.s2_keep_attention_output,
            seq_length=args.seq_length,
            packed=is_packed(args),
            packed_cut=packed_cut(args),
            softmax_type=getattr(args, "softmax_type", "vanilla"),
            dense_comm_types=tuple(getattr(args, "cp_comm_type", None) or ("p2p",)),
        )

    def comm_type(self, layer: int) -> str:
        """How the context-parallel ranks exchange keys and values in a layer, counted from 0 with the
        multi-token-prediction layers behind the decoder's; layers beyond the list follow its last entry."""
        return self.cp_comm_types[min(layer, len(self.cp_comm_types) - 1)]

    @property
    def planned_length(self) -> int | None:
        """The length that every exchange of keys and values has, to plan it when the model is built; None where it
        changes from batch to batch."""
        return None if self.packed else self.seq_length


@dataclass(frozen=True)
class RunFlags:
    """What the command line says of a run's losses and logs, with S2 layers or without.

    loss_log: --s2-loss-log. position_buckets: --s2-position-loss. first_token: --s2-loss-from-token. masks: the flags
    that leave targets out of the loss, as they were given. seq_length: tokens of a training sequence. log_throughput:
    --log-throughput.
    """

    loss_log: str | None
    position_buckets: int | None
    first_token: int | None
    masks: tuple[str, ...]
    seq_length: int
    log_throughput: bool

    @classmethod
    def from_args(cls, args: Namespace) -> RunFlags:
        """args: Megatron's, with the flags of add_s2_arguments."""
        first = args.s2_loss_from_token
        masks = [] if first is None else [f"--s2-loss-from-token {first}"]
        masks += [f"--{name.replace('_', '-')}" for name in ("eod_mask_loss", "sft") if getattr(args, name)]
        return cls(
            loss_log=args.s2_loss_log,
            position_buckets=args.s2_position_loss,
            first_token=first,
            masks=tuple(masks),
            seq_length=args.seq_length,
            log_throughput=args.log_throughput,
        )


@dataclass(frozen=True)
class S2Run:
    """What prepare_s2 found for a run. sparsity: which blocks each layer attends. settings: how that is computed."""

    sparsity: ResolvedSparsity
    settings: S2Settings
