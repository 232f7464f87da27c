"""What two runs must have in common for their losses to be comparable, and which runs are seeds of the same "
"settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from s2_megatron.tools.compare.runs import Run, number

# Megatron's arguments that decide what is learnt, by kind. What is missing here decides how it is computed (parallel
# layout, recomputation, kernels) or where it is written, and may differ.
CHECKED = {
    "data": (
        "data_path", "train_data_path", "valid_data_path", "data_args_path", "per_split_data_args_path", "split",
        "mock_data", "sft",
        "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "dataloader_inter_document_masking",
        "dataloader_type",
        "fim_data", "fim_rate", "fim_spm_rate", "iterations_to_skip", "seq_length", "eval_iters",
        "eval_global_batch_size",
        "logits_load_dir",
    ),
    "tokenizer": (
        "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "vocab_extra_ids",
        "tiktoken_pattern",
    ),
    "batch": ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "calculate_per_token_loss"),
    "schedule": (
        "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples",
        "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
        "decoupled_lr",
        "decoupled_min_lr", "optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "muon_momentum",
        "clip_grad",
        "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "pretrained_checkpoint",
        "finetune",
    ),
    "model": (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention",
        "num_query_groups",
        "kv_channels", "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent",
        "rotary_interleaved",
        "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "no_rope_freq",
        "normalization",
        "layernorm_epsilon", "layernorm_zero_centered_gamma", "swiglu", "squared_relu", "quick_geglu", "openai_gelu",
        "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights",
        "apply_residual_connection_post_layernorm",
        "qk_layernorm", "qk_l2_norm", "qk_clip", "attention_output_gate", "softmax_type", "window_size",
        "window_attn_skip_freq",
        "attention_dropout", "hidden_dropout", "init_method_std", "init_method_xavier_uniform",
        "embedding_init_method_std",
        "use_mup", "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk",
        "moe_router_score_function",
        "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        "moe_shared_expert_intermediate_size",
        "moe_expert_capacity_factor", "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_pre_softmax", "multi_latent_attention", "q_lora_rank",
        "kv_lora_rank",
        "mtp_num_layers", "mtp_loss_scaling_factor", "hybrid_layer_pattern", "experimental_attention_variant",
    ),
    "precision": ("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp32_residual_connection", "grad_reduce_in_bf16"),
}  # fmt: skip
WINDOWS = ("window_size", "window_attn_skip_freq")
NOT_LOGGED = (None, "", "None")
ALL = "all"  # --vary all: nothing is checked
DENSE = "dense"
# In the header of a thinned log (studies): the hash of the losses of the run whose weights it begins with.
START_LOSSES = "start_losses"


@dataclass(frozen=True)
class Arm:
    """Runs of the same settings with several seeds. sparsity: canonical JSON, or "dense"."""

    name: str
    runs: tuple[Run, ...]
    sparsity: str


def same(one, other) -> bool:
    """Whether two logged values of an argument agree; a log keeps them as JSON or as text."""
    if str(one) == str(other):
        return True
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _value(arguments: dict, name: str):
    value = arguments.get(name)
    if name == "lr_decay_iters" and str(value) == "None":
        return arguments.get("train_iters")  # as Megatron's scheduler takes it
    if name == "hybrid_layer_pattern" and value not in NOT_LOGGED:
        return str(value).replace("|", "")  # the same model in other pipeline stages
    if name in WINDOWS and arguments.get("s2_sparsity") not in NOT_LOGGED:
        return None  # the windows of --s2-config window-size: a part of the sparsity, which may differ
    return value


def check_comparable(runs: Sequence[Run], vary: Sequence[str]) -> None:
    """Raises ValueError when the runs differ in more than sparsity, seed and the settings that `vary` names, or when a
    run's arguments were not logged."""
    if ALL in vary:
        return
    known = {name for names in CHECKED.values() for name in names} | {"seed"}
    unknown = sorted(set(vary) - known)
    if unknown:
        raise ValueError(
            f"--vary {','.join(unknown)}: not among the settings that are checked; expected names of Megatron's "
            "arguments "
            f"such as lr or global_batch_size, or {ALL}"
        )
    for run in runs:
        if run.arguments is None:
            raise ValueError(
                f"run {run.name} ({', '.join(run.sources)}): its arguments were not logged, so nothing says that it "
                "had the "
                "same data, batch and schedule; give its TensorBoard folder too (PATH,PATH), or pass --vary all"
            )
    first = runs[0]
    for run in runs[1:]:
        found = {}
        for kind, names in CHECKED.items():
            for name in names:
                if name in vary or name not in first.arguments or name not in run.arguments:
                    continue
                pair = _value(first.arguments, name), _value(run.arguments, name)
                if not same(*pair):
                    found.setdefault(kind, {})[name] = pair
        if found:
            text = "; ".join(
                f"{kind}: " + ", ".join(f"{name} {pair[0]} and {pair[1]}" for name, pair in items.items())
                for kind, items in found.items()
            )
            names = ",".join(name for items in found.values() for name in items)
            raise ValueError(
                f"runs {first.name} and {run.name} differ in {text}; expected the same but for sparsity and seed; pass "
                f"--vary {names} if that is meant"
            )


def mixed_settings(arm: Arm) -> dict[str, list[str]]:
    """{setting that decides what is learnt: its values}, of those that the runs of the arm do not share; of sparsities
    the names of their YAMLs."""
    logged = [run for run in arm.runs if run.arguments is not None]
    mixed = {}
    for name in (name for names in CHECKED.values() for name in names):
        values: list = []
        for value in (_value(run.arguments, name) for run in logged if name in run.arguments):
            if not any(same(value, each) for each in values):
                values.append(value)
        if len(values) > 1:
            mixed[name] = [str(value) for value in values]
    sparsities = {sparsity_of(run): sparsity_name(run) for run in logged}
    if len(sparsities) > 1:
        mixed["sparsity"] = list(sparsities.values())
    return mixed


def begins_with(run: Run) -> tuple | None:
    """What weights a run goes on from; None for random ones, and where its arguments were not logged. Runs with equal
    values begin with equal weights; the studies' logs name the dense run by its losses, too."""
    arguments = run.arguments or {}
    source = arguments.get("pretrained_checkpoint")
    return None if source in (None, "", "None") else (source, arguments.get(START_LOSSES))


def sparsity_of(run: Run) -> str:
    """The canonical JSON of the run's sparsity, or "dense": a dense YAML and no YAML are the same attention."""
    text = (run.arguments or {}).get("s2_sparsity")
    if text in NOT_LOGGED:
        return DENSE
    content = json.loads(text)
    if content.get("softmax_scale") is None and all(form["kind"] == "dense" for form in content["patterns"]):
        return DENSE
    return text


def make_arms(runs: Sequence[Run], vary: Sequence[str], named: Sequence[bool]) -> list[Arm]:
    """The runs in groups of equal sparsity and equal varied settings, in the order of their first runs.

    named: whether the user named the run; runs of one name are an arm, whatever their settings. Raises ValueError when
    an arm has two runs of one seed: their order could not be told, and neither could be paired.
    """
    settings = [name for name in vary if name not in (ALL, "seed")]
    groups: dict[tuple, list[Run]] = {}
    for run, has_name in zip(runs, named):
        if has_name:
            key = ("named", run.name)
        elif ALL in vary or run.arguments is None:
            key = ("alone", run.sources)
        else:
            key = (sparsity_of(run), *(str(_value(run.arguments, name)) for name in settings))
        groups.setdefault(key, []).append(run)
    arms, taken = [], {}
    for key, members in groups.items():
        seeds = [seed_of(run) for run in members]
        if len(set(seeds)) < len(seeds):
            names = ", ".join(", ".join(run.sources) for run in members)
            raise ValueError(
                f"{names}: equal settings and seed {', '.join(map(str, sorted(set(seeds), key=str)))}; expected one "
                "run per "
                "seed in an arm; name the arms to compare them (one=PATH two=PATH), or join the pieces of one run "
                "with a comma"
            )
        alone = len(members) == 1 or key[0] in ("named", "alone")
        name = members[0].name if alone else _arm_name(members[0], settings, groups)
        taken[name] = taken.get(name, 0) + 1
        arms.append(
            Arm(name if taken[name] == 1 else f"{name} #{taken[name]}", tuple(members), sparsity_of(members[0]))
        )
    return arms


def sparsity_name(run: Run) -> str:
    """Of its YAML, where one was given."""
    config = run.arguments.get("s2_config")
    return DENSE if sparsity_of(run) == DENSE else Path(config).stem if config not in (None, "None") else "S2"


def _arm_name(run: Run, settings: list[str], groups: dict) -> str:
    differing = [name for index, name in enumerate(settings) if len({key[1 + index] for key in groups}) > 1]
    return " ".join([sparsity_name(run), *(f"{setting}={_value(run.arguments, setting)}" for setting in differing)])


def seed_of(run: Run) -> int | str:
    seed = number(run.arguments, "seed")
    return run.name if seed is None else int(seed)


def pair_by_seed(arm: Arm, baseline: Arm, vary: Sequence[str]) -> list[tuple[Run, Run]]:
    """[(run of the arm, run of the baseline)], of equal seeds, hence of the same initial weights and order of data.

    With "seed" or "all" in `vary` runs are paired as they were given when no seed is in both arms. Raises ValueError
    when there is no pair.
    """
    by_seed = {seed_of(run): run for run in baseline.runs}
    pairs = [(run, by_seed[seed_of(run)]) for run in arm.runs if seed_of(run) in by_seed]
    if pairs:
        return pairs
    if {"seed", ALL} & set(vary):
        return list(zip(arm.runs, baseline.runs))
    own, other = (", ".join(str(seed_of(run)) for run in each.runs) for each in (arm, baseline))
    raise ValueError(
        f"{arm.name} has seeds {own} and {baseline.name} has {other}; expected a seed in common: only then the "
        "batches are the "
        "same and their noise cancels; train one with the other's seed, or pass --vary seed"
    )
