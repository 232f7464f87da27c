"""Values of flags with which a training hangs, fills the memory, or computes something else without a word; Megatron
says what it does not take itself. `s2-megatron inspect`, which computes with some of them, looks here, too: neither
Megatron nor torch is imported, and what `args` lacks was not given.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import NamedTuple

from s2_megatron.config.errors import printable
from s2_megatron.config.resolve import MOST_HEADS, MOST_LAYERS, MOST_SEQ_LENGTH

# (least, most, integer flags). Sizes beyond `most` are a slip that fills the memory, or lists without end. Of
# iterations, intervals and times Megatron takes 0 and less for never, or for at once.
LIMITS = (
    (1, MOST_LAYERS, "num_layers num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank"),
    (1, MOST_LAYERS, "moe_layer_freq"),
    (0, MOST_LAYERS, "mtp_num_layers"),
    (1, MOST_HEADS, "num_attention_heads num_query_groups"),
    (1, MOST_SEQ_LENGTH, "seq_length max_position_embeddings s2_position_loss"),
    (1, 2**16, "qk_head_dim qk_pos_emb_head_dim v_head_dim q_lora_rank kv_lora_rank"),
    (1, 2**16, "kv_channels tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
    (0, 2**16, "num_workers"),
    (1, 2**20, "hidden_size micro_batch_size make_vocab_size_divisible_by"),
    (1, 2**24, "ffn_hidden_size"),
    (1, 2**31 - 1, "vocab_size global_batch_size seed exit_duration_in_mins distributed_timeout_minutes"),
    (1, 10**12, "train_iters save_interval eval_interval exit_interval ckpt_step gpu_sniff_test_interval"),
    (1, 10**12, "rotary_base rotary_seq_len_interpolation_factor"),
    (0, 10**12, "eval_iters"),
)
RANGES = {name: (least, most) for least, most, names in LIMITS for name in names.split()}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


# Of the optimizers, which do not all look at them: (what is taken, in words, one that is)
NUMBERS = {
    "adam_beta1": (lambda value: 0 <= value < 1, "0 or more and less than 1", 0.9),
    "adam_beta2": (lambda value: 0 <= value < 1, "0 or more and less than 1", 0.95),
    "adam_eps": (lambda value: value > 0, "above 0", 1e-8),  # 0 / 0 for every row of weights without a gradient
    "lr": (math.isfinite, "a finite number", 3e-4),
}


class Mistake(NamedTuple):
    """made: whether Megatron's arguments, as the parser left them, make it. text: of the error; {name} stands for the
    argument of that name. own_data: whether it is one with the datasets of pretrain_gpt_s2.py alone."""

    made: Callable[[Namespace], bool]
    text: str
    own_data: bool = False


class _Arguments(Namespace):
    """Megatron's, with None for those that another release does not have, or inspect does not read."""

    def __getattr__(self, name: str) -> None:
        return None


def refuse_first(args: Namespace, mistakes: Iterable[Mistake]) -> None:
    """Raises ValueError for the first of the mistakes that these arguments make."""
    given = _Arguments(**vars(args))
    for mistake in mistakes:
        if mistake.made(given):
            values = {
                name: " ".join(map(str, value)) if isinstance(value, list) else value
                for name, value in vars(args).items()
            }
            raise ValueError(mistake.text.format(**{name: printable(value, 200) for name, value in values.items()}))


ENDLESS = Mistake(
    lambda args: (
        (args.recompute_granularity, args.recompute_method) == ("full", "uniform")
        and not (args.recompute_activations or args.skip_train)  # the older flag wins
        and args.recompute_num_layers is not None
        and args.recompute_num_layers < 1
    ),
    "--recompute-num-layers={recompute_num_layers} with --recompute-method uniform: Megatron never comes to the last "
    "layer; expected 1 or more; use --recompute-num-layers 1",
)


def check_values(args: Namespace) -> None:
    """Everything of this module. args: as Megatron's parser left them, or some of them. Raises ValueError."""
    for name, value in vars(args).items():
        flag = flag_of(name)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{flag}=nan: expected a number; correct it, or leave it out")
        if name in RANGES and isinstance(value, int) and not isinstance(value, bool):
            least, most = RANGES[name]
            if not least <= value <= most:
                near = min(max(value, least), most)
                raise ValueError(
                    f"{flag}={printable(value, 30)}: expected {least} to {most}; use {flag} {near}, or leave it out"
                )
        taken, words, example = NUMBERS.get(name, (lambda value: True, "", 0))
        if value is not None and not taken(value):
            raise ValueError(f"{flag}={value:g}: out of its range; expected {words}; use {flag} {example:g}")
    refuse_first(args, (ENDLESS,))
