"""Megatron-core's core attention (softmax(QK)V, between the qkv and the output projection) computed by S2-Attention.

s query tokens, sk key tokens (the whole prefix in static inference), b microbatch, t packed tokens; np query heads, ng
KV heads and hn head dim of one tensor-parallel rank (hv of values, another one in multi-latent attention).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.megatron.host.cuda_on_cpu import compute_device
from s2_megatron.megatron.settings import S2Settings, computed_head_dim
from s2_megatron.megatron.sparsity import check_layer_window
from s2_megatron.ops.api import make_call
from s2_megatron.ops.layout import Layout, PackedSequence, build_layout
from s2_megatron.ops.recompute import layer_output, recompute_attention
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern

# TransformerConfig settings that change what attention computes, with the value that S2 honours and the flag for it.
# The command line is checked before (refusals/, which know more); this list is for models that are built without it.
HONOURED_CONFIG = (
    ("attention_dropout", 0.0, "--attention-dropout 0.0"),
    ("experimental_attention_variant", None, "drop --experimental-attention-variant"),
    ("fp8_dot_product_attention", False, "set fp8_dot_product_attention=False"),
    ("fp8_multi_head_attention", False, "set fp8_multi_head_attention=False"),
    ("qk_clip", False, "drop --qk-clip"),
    ("log_max_attention_logit", False, "drop --log-max-attention-logit"),
    ("batch_invariant_mode", False, "drop --batch-invariant-mode"),
    (
        "flash_decode",
        False,
        "drop --flash-decode: it reads the KV cache without the core attention, hence without the sparsity",
    ),
)

DEFAULTS = S2Settings()
_layouts: dict[tuple[str, torch.device], Layout] = {}
_context_parallel: dict[tuple, ContextParallel] = {}


@dataclass
class PackedAcrossRanks(PackedSeqParams):
    """A packed row that was cut over context-parallel ranks as one sequence, whatever its documents are
    (--dataloader-inter-document-masking).

    The fields of PackedSeqParams describe that one sequence: Megatron's RoPE, which is relative, then takes the right
    positions on every rank. documents has the borders that the attention must respect; only S2's core attention reads
    it.
    """

    documents: PackedSequence | None = None


def require_honoured(config: TransformerConfig, where: str) -> None:
    """Raise ValueError for the first setting in `config` that S2 cannot honour."""
    for name, honoured, fix in HONOURED_CONFIG:
        value = getattr(config, name, honoured)
        if value != honoured:
            raise ValueError(f"{where}: {name}={value!r}; expected {honoured!r}; {fix}")


class S2CoreAttention(MegatronModule):
    """Drop-in for Megatron's DotProductAttention in one layer. Its only weight is `softmax_offset` [np], as in
    Megatron's and Transformer Engine's, where config.softmax_type is learnable; else it adds no keys to a checkpoint.

    config, layer_number (1-based), attn_mask_type, attention_type, softmax_scale, cp_comm_type, pg_collection,
    k_channels and v_channels (of multi-latent attention): as Megatron passes them. pattern: the layer's pattern over
    all heads of the model, before tensor-parallel slicing. layer_index: the 0-based layer that the pattern is meant
    for, to check against layer_number. settings: of the run. s2_cp_comm_type: one of ContextParallel's; Megatron's
    cp_comm_type is for its own layers.
    config.deterministic_mode selects the deterministic backward.
    Raises ValueError for settings that S2-Attention does not honour, and for a pattern of another model shape.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        pattern: Pattern,
        layer_index: int | None = None,
        settings: S2Settings = DEFAULTS,
        s2_cp_comm_type: str = "sparse",
    ):
        super().__init__(config=config)
        # The spec was made for one layer; Megatron numbers layers itself, by its own pipeline arithmetic.
        assert layer_index is None or layer_number == layer_index + 1, (
            f"spec of layer {layer_index} (from 0) built as {layer_number} (from 1)"
        )
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.settings = settings
        self.deterministic = config.deterministic_mode
        self.softmax_scale = config.softmax_scale if softmax_scale is None else softmax_scale  # None: hn ** -0.5

        require_honoured(config, self._name)
        if attention_dropout:
            raise ValueError(
                f"{self._name}: attention_dropout={attention_dropout}; expected 0.0; add --attention-dropout 0.0"
            )
        if attention_type != "self":
            raise ValueError(
                f"{self._name}: attention_type={attention_type!r}; expected 'self'; keep cross attention dense (plan "
                "letter D)"
            )
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"{self._name}: attn_mask_type={attn_mask_type}; expected causal; keep this layer dense (plan letter D)"
            )
        if (k_channels is not None or v_channels is not None) and not config.multi_latent_attention:
            raise ValueError(
                f"{self._name}: k_channels={k_channels}, v_channels={v_channels}; expected None, one head dim for q, k "
                "and v, without --multi-latent-attention"
            )

        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        tp_rank, tp_size = pg_collection.tp.rank(), pg_collection.tp.size()
        # With fewer KV groups than ranks Megatron passes a copy of the config that counts one group a rank.
        groups = pattern.num_kv_heads if pattern.num_kv_heads >= tp_size else tp_size
        if (config.num_attention_heads, config.num_query_groups) != (pattern.num_heads, groups):
            raise ValueError(
                f"{self._name}: the model has {config.num_attention_heads} heads and {config.num_query_groups} KV "
                f"groups, its pattern {pattern.num_heads} and {pattern.num_kv_heads}; expected the same; resolve the "
                "S2 config for this model's shape"
            )
        check_layer_window(pattern, config, layer_number, self._name)
        self.use_pattern(pattern.tensor_parallel_slice(tp_rank, tp_size))
        self._make_softmax_offset(pg_collection.tp)
        self.context_parallel = None
        if config.context_parallel_size > 1:
            assert pg_collection.cp.size() == config.context_parallel_size
            self.context_parallel = self._shared_context(pg_collection.cp, s2_cp_comm_type)
            if settings.planned_length is not None:
                self.context_parallel.prepare(
                    settings.planned_length,
                    compute_device(),
                    computed_head_dim(config),
                    config.params_dtype,
                    settings.backend,
                )

    def _make_softmax_offset(self, tp_group) -> None:
        """softmax_offset, one number a query head of this rank: none (vanilla), zeros (off-by-one), or a parameter
        (learnable) that begins as that of the stock layer: at zero in Transformer Engine's, else drawn by Megatron."""
        config = self.config
        self.tp_group = tp_group
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        heads, device = self.local_pattern.num_heads, compute_device()
        if config.softmax_type == "off-by-one":
            # Moves with the module, and is in no checkpoint.
            zeros = torch.zeros(heads, device=device, dtype=config.params_dtype)
            self.register_buffer("softmax_offset", zeros, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, device=device, dtype=config.params_dtype))
        if config.perform_initialization and config.transformer_impl != "transformer_engine":
            config.init_method(self.softmax_offset)
        # Unlike in Megatron's, so that the gradients' norm counts the heads of every rank.
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata: dict | None = None) -> ShardedStateDict:
        """As Megatron's DotProductAttention and Transformer Engine's in Megatron store it: cut over tensor-parallel
        ranks. Transformer Engine's has an empty _extra_state beside a learnable offset, which Megatron wants of every
        layer or of none."""
        state = self.state_dict(prefix="", keep_vars=True)
        if not state:
            return {}
        if self.config.transformer_impl == "transformer_engine":
            state["_extra_state"] = None
        ranks = dict(tp_group=self.tp_group, dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **ranks)

    def use_pattern(self, pattern: Pattern) -> None:
        """Attend by another pattern from now on, of the same heads. pattern: of this rank's heads. Not for a layer
        whose context parallelism is planned: its plan is the first pattern's."""
        self.local_pattern = pattern
        self._pattern_key = json.dumps(pattern.canonical(), sort_keys=True)

    def _shared_context(self, group, comm_type: str) -> ContextParallel:
        """Layers with the same pattern and settings share the plan, and what of it lies on the device."""
        options = dict(keep_received=self.settings.cp_keep_received, cut=self.settings.packed_cut)
        key = (self._pattern_key, group, comm_type, *options.values())
        if key not in _context_parallel:
            try:
                _context_parallel[key] = ContextParallel(self.local_pattern, group, comm_type, **options)
            except ValueError as error:
                raise ValueError(f"{self._name}: {error}") from error
        return _context_parallel[key]

    @property
    def _name(self) -> str:
        return f"S2 attention of layer {self.layer_number} (counted from 1)"

    def layout(self, device: torch.device) -> Layout:
        """The block geometry of this rank's heads on a device; layers whose patterns attend the same blocks share
        one."""
        key = (self._pattern_key, device)
        if key not in _layouts:
            _layouts[key] = build_layout(self.local_pattern).to(device)
        return _layouts[key]

    def extra_repr(self) -> str:
        pattern, backend = self.local_pattern.describe(), self.settings.backend
        return f"layer_number={self.layer_number}, {pattern=}, {backend=}"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attention of the layer's heads on this rank.

        query [s, b, np, hn], key [sk, b, ng, hn], value [sk, b, ng, hv], any strides; packed: [t, np, hn] and so on;
        with context parallelism this rank's share of the tokens, in Megatron's order. attention_mask is not read: the
        pattern is causal, and a mask type that says more than that is refused.
        Returns [s, b, np*hv], packed [t, np*hv], in query's dtype.
        Raises ValueError for a bias, a mask that is not causal, or packed sequences in another format than thd.
        """
        if attention_bias is not None:
            raise ValueError(
                f"{self._name}: attention_bias has shape {list(attention_bias.shape)}; expected None; "
                "use RoPE (--position-embedding-type rope), or keep this layer dense (plan letter D)"
            )
        if self.config.flash_decode:
            require_honoured(self.config, self._name)
        packed = None if packed_seq_params is None else self._packed(packed_seq_params, query)
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        self._check_mask_type(mask_type, query, key, packed)
        # Only inside a call that Megatron will run, or runs, a second time.
        output = layer_output(self) if self.settings.keep_attention_output and self.training else None
        options = dict(
            softmax_scale=self.softmax_scale,
            packed=packed,
            backend=self.settings.backend,
            deterministic=self.deterministic,
        )
        if self.context_parallel is not None:
            return self.context_parallel.attention(
                query, key, value, softmax_offset=self.softmax_offset, output=output, **options
            ).flatten(-2)
        form = "sbhd" if packed is None else "thd"
        call = make_call(query, key, value, self.layout(query.device), tensor_format=form, **options)
        return recompute_attention(query, key, value, call, output, self.softmax_offset).flatten(-2)

    def _check_mask_type(self, mask_type, query, key, packed) -> None:
        # Static inference: the query is the end of the key. Megatron then switches its mask off, as one new token sees
        # every key; for several new tokens at once the pattern is bottom-right causal, whatever the mask type says.
        continues_prefix = packed is None and key.shape[0] > query.shape[0]
        if mask_type in (AttnMaskType.causal, AttnMaskType.causal_bottom_right):
            return
        if mask_type == AttnMaskType.no_mask and continues_prefix:
            return
        if mask_type == AttnMaskType.padding_causal and packed is not None:
            return
        raise ValueError(
            f"{self._name}: attn_mask_type={mask_type} with {query.shape[0]} queries and {key.shape[0]} keys, "
            f"{'packed' if packed else 'not packed'}; expected causal; keep this layer dense (plan letter D)"
        )

    def _packed(self, params: PackedSeqParams, query: torch.Tensor) -> PackedSequence:
        if params.qkv_format != "thd":
            raise ValueError(f"{self._name}: packed sequences in qkv_format={params.qkv_format!r}; expected 'thd'")
        if self.context_parallel is not None and (self.context_parallel.cut == "sequence") != isinstance(
            params, PackedAcrossRanks
        ):
            raise ValueError(
                f"{self._name}: packed_seq_params is {type(params).__name__}, but the batch was cut by "
                f"{self.context_parallel.cut}; expected PackedAcrossRanks for a row cut as one sequence, "
                "PackedSeqParams for documents cut by themselves; read batches with "
                "s2_megatron.megatron.data.next_batch"
            )
        if isinstance(params, PackedAcrossRanks):
            return params.documents
        for ours, theirs, name in (
            (params.cu_seqlens_q, params.cu_seqlens_kv, "cu_seqlens"),
            (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded, "cu_seqlens_padded"),
        ):
            # Identity first: comparing values would wait for the GPU in every layer.
            if ours is not theirs and (ours is None or theirs is None or not torch.equal(ours, theirs)):
                raise ValueError(
                    f"{self._name}: {name} of queries and keys differ; expected the same documents in both"
                )
        cu_seqlens, longest = params.cu_seqlens_q.to(torch.int32), params.max_seqlen_q
        if longest is None:
            # Only block masks have a longest length to check; reading it off the borders would make every layer wait
            # for the GPU.
            limited = isinstance(self.local_pattern, BlockMaskPattern)
            longest = int(cu_seqlens.diff().max()) if limited else query.shape[0]
        padded = params.cu_seqlens_q_padded
        return PackedSequence(cu_seqlens, int(longest), None if padded is None else padded.to(torch.int32))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # Transformer Engine's attention leaves such a key in checkpoints of --ckpt-format torch; a module without state
        # skips it.
        state_dict.pop(prefix + "_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class S2Attention:
    """One of Megatron's attention modules around an S2CoreAttention, which refuses the two inference paths that bypass
    the core attention: they read the KV cache with dense attention kernels.
    """

    def flash_decode(self, *args, **kwargs):
        raise ValueError(
            f"flash_decode=True in layer {self.layer_number} (counted from 1): it bypasses S2-Attention and would "
            "compute dense attention; expected False; drop --flash-decode"
        )

    def flash_decode_and_prefill(self, *args, **kwargs):
        raise ValueError(
            f"dynamic inference in layer {self.layer_number} (counted from 1): the dynamic engine bypasses "
            "S2-Attention and would compute dense attention; expected static batching; use StaticInferenceContext"
        )


class S2SelfAttention(S2Attention, SelfAttention):
    """Megatron's SelfAttention around an S2CoreAttention."""


class S2LatentAttention(S2Attention, MLASelfAttention):
    """Megatron's multi-latent attention (--multi-latent-attention) around an S2CoreAttention."""


# What stands in a layer's spec, and what takes its place.
ATTENTION_MODULES = {SelfAttention: S2SelfAttention, MLASelfAttention: S2LatentAttention}
