"""preflight/schedule.py has Megatron go through schedules: what that refuses, also in the middle of a training, and
what it leaves as it was."""

from argparse import Namespace

from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

install_if_no_gpu()

from megatron.core import num_microbatches_calculator as batches  # noqa: E402
from megatron.training import training  # noqa: E402
from megatron.training.global_vars import set_args  # noqa: E402

from s2_megatron.megatron.errors import error_text  # noqa: E402
from s2_megatron.megatron.preflight.schedule import check_schedule  # noqa: E402

GOOD = dict(
    train_iters=100, train_samples=None, lr_decay_iters=None, lr_decay_samples=None, lr_warmup_iters=2,
    lr_warmup_samples=0, lr_warmup_fraction=None, lr_warmup_init=0.0, lr_wsd_decay_iters=None,
    lr_wsd_decay_samples=None, lr_wsd_decay_style="linear", lr=1e-3, min_lr=0.0, lr_decay_style="cosine",
    weight_decay_incr_style="constant", start_weight_decay=0.1, end_weight_decay=0.1,
    override_opt_param_scheduler=False,
    use_checkpoint_opt_param_scheduler=False, skip_train=False, global_batch_size=4, step_batch_size_schedule=None,
)  # fmt: skip
SAMPLES = dict(train_iters=None, train_samples=400, lr_warmup_iters=0)
# (changes, the schedule in the checkpoint, words of the error)
REFUSED = (
    (dict(lr_warmup_iters=100), None, "lr_warmup_steps < self.lr_decay_steps, with lr_warmup_steps=400"),
    (dict(lr_decay_style="WSD"), None, "wsd_decay_steps is not None"),  # reached behind the warm-up
    (SAMPLES | dict(lr_decay_style="WSD"), None, "wsd_decay_steps is not None"),
    (SAMPLES | dict(lr_warmup_samples=400), None, "lr_warmup_steps < self.lr_decay_steps"),
    (dict(step_batch_size_schedule="0:4 2K:3"), None, "divisible"),  # reached in the middle
    (dict(lr=2e-3), GOOD, "learning rate do not match"),
    (dict(global_batch_size=8), GOOD, "--override-opt-param-scheduler"),
)
TAKEN = (
    ({}, None),
    (SAMPLES, None),
    (dict(lr_decay_style="WSD", lr_wsd_decay_iters=10), None),
    (dict(step_batch_size_schedule="0:4 2K:8"), None),
    ({}, GOOD),
    (dict(lr=2e-3, override_opt_param_scheduler=True), GOOD),
    (dict(skip_train=True, lr=None), None),
)


def state_of(settings: dict) -> dict:
    """Of a run's schedule after 40 samples."""
    from types import SimpleNamespace

    set_args(Namespace(**settings))
    made = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[{}]))
    made.step(40)
    return made.state_dict()


def checked(changes: dict, resumed: dict | None) -> str | None:
    """The error, or None; afterwards everything is as it was."""
    args = Namespace(**GOOD | changes)
    state = None if resumed is None else state_of(resumed)
    before = dict(vars(args))
    set_args(args)
    batches.init_num_microbatches_calculator(
        0, global_batch_size=args.global_batch_size, micro_batch_size=1, data_parallel_size=2, seq_length=64,
        step_batch_size_schedule=args.step_batch_size_schedule,
    )  # fmt: skip
    first = batches.get_num_microbatches()
    try:
        check_schedule(args, state)
        return None
    except (AssertionError, ValueError, TypeError, ArithmeticError) as error:
        return error_text(error)
    finally:
        assert vars(args) == before and training.get_args() is args and batches.get_num_microbatches() == first
        batches.unset_num_microbatches_calculator()


def main() -> None:
    for changes, resumed, words in REFUSED:
        said = checked(changes, resumed)
        assert said is not None and words in said and said.startswith("Megatron refuses these flags: "), (changes, said)
    for changes, resumed in TAKEN:
        said = checked(changes, resumed)
        assert said is None, (changes, said)


if __name__ == "__main__":
    main()
