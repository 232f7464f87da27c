"""preflight/schedule.py beside Megatron's own scheduler: what the one refuses, the other fails on, and nothing else.

schedules.py EXAMPLES: draws settings of the learning rate and the weight decay, and resumes of one schedule by another.
"""

import sys
from argparse import Namespace
from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

install_if_no_gpu()

from megatron.training import training  # noqa: E402

from s2_megatron.megatron.preflight.schedule import check_schedule, compare_schedules  # noqa: E402

RATES = st.sampled_from([0.0, 1e-4, 1e-3, 2.0])
LENGTHS = st.sampled_from([1, 2, 10, 11, 100])
WAITS = st.sampled_from([0, 1, 9, 10, 11, 100])
DECAYS = st.sampled_from([-0.1, 0.0, 0.1, 0.2])
STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]


@st.composite
def arguments(draw):
    """Megatron's, validated but for what is looked at here: lengths of one unit, the other one's unset."""
    samples, style = draw(st.booleans()), draw(st.sampled_from(["constant", "linear", "cosine"]))
    fraction, decay = draw(st.sampled_from([None, None, 0.0, 0.01, 0.5, 0.999, 1.0, 1.5])), draw(DECAYS)
    unit, other = ("samples", "iters") if samples else ("iters", "samples")
    return Namespace(
        **{f"train_{unit}": draw(LENGTHS), f"train_{other}": None},
        **{f"lr_decay_{unit}": draw(st.none() | LENGTHS), f"lr_decay_{other}": None},
        **{f"lr_warmup_{unit}": 0 if fraction is not None else draw(WAITS), f"lr_warmup_{other}": 0},
        **{f"lr_wsd_decay_{unit}": draw(st.none() | WAITS), f"lr_wsd_decay_{other}": None},
        lr=draw(st.sampled_from([1e-3, 1e-2])), min_lr=draw(RATES), lr_warmup_init=draw(RATES),
        lr_warmup_fraction=fraction, lr_decay_style=draw(st.sampled_from(STYLES)), lr_wsd_decay_style="linear",
        weight_decay=decay, weight_decay_incr_style=style,
        start_weight_decay=decay if style == "constant" else draw(DECAYS),
        end_weight_decay=decay if style == "constant" else draw(DECAYS),
        override_opt_param_scheduler=draw(st.booleans()), use_checkpoint_opt_param_scheduler=draw(st.booleans()),
        skip_train=False, global_batch_size=1 if samples else draw(st.sampled_from([1, 4])),
        step_batch_size_schedule=None,
    )  # fmt: skip


def scheduler(args):
    """Megatron's, for an optimizer with one group of parameters; it sets arguments, of a copy."""
    groups = SimpleNamespace(param_groups=[{}])
    with patch.object(training, "get_args", lambda: Namespace(**vars(args))), patch("builtins.print"):
        return training.get_optimizer_param_scheduler(groups)


def through(made):
    """The ways to the end: every step of a run raises no assertion either."""
    for _ in range(12):
        made.step(10)
    return made


def refused(function, *given, errors) -> str | None:
    try:
        function(*given)
    except errors as error:
        return str(error) or type(error).__name__
    return None


def main(examples: int) -> None:
    seen = {"made": 0, "refused": 0, "resumed": 0, "not resumed": 0}

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(arguments(), arguments(), st.booleans())
    def one(args, other, alike):
        ours = refused(check_schedule, args, errors=ValueError)
        theirs = refused(lambda: through(scheduler(args)), errors=(AssertionError, ValueError, ZeroDivisionError))
        assert (ours is None) == (theirs is None), f"{ours} / {theirs}: {args}"
        seen["made" if ours is None else "refused"] += 1
        if alike:  # but for one thing
            other = Namespace(**{**vars(args), "min_lr": other.min_lr, "lr": other.lr})
        if ours is not None or refused(check_schedule, other, errors=ValueError) is not None:
            return
        state = scheduler(args).state_dict()
        ours = refused(compare_schedules, other, state, args, "--load=x: iteration 1", errors=ValueError)
        theirs = refused(lambda: scheduler(other).load_state_dict(state), errors=AssertionError)
        assert (ours is None) == (theirs is None), f"{ours} / {theirs}: {args} {other}"
        seen["resumed" if ours is None else "not resumed"] += 1

    one()
    print(seen)
    assert min(seen.values()) > 5, seen


if __name__ == "__main__":
    main(int(sys.argv[1]))
