"""Every change that this package makes to Megatron's modules; nothing else here assigns into them.

Read from megatron-core 0.19.2. Each function may be called again: the module is then left as it is.

| function | what it replaces in Megatron | the reason |
|---|---|---|
| use_prebuilt_dataset_helpers | core.datasets.utils.compile_helpers | it runs `make` where nothing is to be built |
| install_flop_accounting | four functions of training.training | they count dense causal attention (records/flops.py) |
| install_loss_log | three functions of training.training | no hook gives the exact losses (records/loss_log.py) |
| use_own_mtp_specs | training.models.gpt.mtp_block_spec | it makes multi-token-prediction layers dense |
| guard_processes | the checkpoint writers' start of processes | they outlive a killed trainer (host/processes.py) |
| install_checkpoint_hooks | saving, loading, setup of the model | no hook is called there (checkpoints/hooks.py) |
| keep_attention_outputs | checkpoint, te_checkpoint of core | which call is run again is told nowhere (recompute.py) |
| install_model_check | the setup of the model | without apply_s2 it would be dense (model/check.py) |

torch itself is patched in one place too: host/cuda_on_cpu.py, before Megatron is imported.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import multiprocessing
import sys
from argparse import Namespace
from pathlib import Path

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.checkpoints.hooks import CheckpointHooks
from s2_megatron.megatron.host.dataset_helpers import check_build, is_built, say_prebuilt
from s2_megatron.megatron.host.processes import (
    call_with_parent,
    end_daemons_with_this_process,
    end_forks_with_this_process,
    end_with_torchrun,
    start_manager,
)
from s2_megatron.megatron.model.rope_scaling import check_rope_scaling, set_rope_scaling
from s2_megatron.megatron.records.counted_targets import counted_targets, losses_of_evaluation, losses_of_step
from s2_megatron.megatron.records.flops import FlopAccounting
from s2_megatron.megatron.records.loss_log import LossLog, exact_number
from s2_megatron.megatron.records.position_loss import EVALUATE, TRAIN, position_loss
from s2_megatron.megatron.records.run import (
    as_record,
    progress,
    read_position_loss,
    report_position_loss,
    run_header,
    validation_suffixes,
)
from s2_megatron.ops.recompute import keep_outputs
from s2_megatron.printing import print_once

logger = logging.getLogger(__name__)


def use_prebuilt_dataset_helpers() -> bool:
    """Skips Megatron's `make` when the library is built; True when it is skipped.

    `pretrain()` runs `make` in `megatron/core/datasets` and exits when that fails. The wheel has the compiled library
    but no Makefile, so that without this patch no run from it starts. A checkout's `make` builds for PATH's python3.
    Raises ValueError when the compiled library is missing, too, or when a checkout cannot build it.
    """
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    if (folder / "Makefile").exists() and not is_built(folder):
        check_build(folder)
        return False
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise ValueError(
            f"{folder} has neither helpers_cpp nor a Makefile to build it; expected one of them; "
            "reinstall megatron-core from its wheel (pip install --force-reinstall megatron-core)"
        )
    utils.compile_helpers = say_prebuilt
    return True


def _replace_everywhere(name: str, old, new) -> None:
    """In the modules that have imported it by this name, too."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


# Name in megatron.training.training -> method of FlopAccounting that takes its place.
_COUNTED = {
    "num_floating_point_operations": "flops",
    "update_seqlen_stats_from_cu_seqlens": "add_documents",
    "consume_seqlen_stats_in_iteration": "consume",
    "training_log": "log",
}
_uncounted: dict = {}  # Megatron's own functions of these names
_accounting: FlopAccounting | None = None


def _counting(name: str, method: str):
    @functools.wraps(_uncounted[name])
    def counting(*args, **kwargs):
        return getattr(_accounting, method)(*args, **kwargs)

    return counting


def install_flop_accounting(args: Namespace, sparsity: ResolvedSparsity) -> FlopAccounting:
    """Makes Megatron's throughput count what `sparsity` attends. Calling again replaces the counts, not the patches.

    Megatron's own functions count dense causal attention, and no argument or hook changes that. A script that has
    imported one of the four by name gets the new one as well. args: Megatron's arguments.
    """
    global _accounting
    from megatron.training import training

    first = not _uncounted
    if first:
        _uncounted.update({name: getattr(training, name) for name in _COUNTED})
    _accounting = FlopAccounting(args, sparsity, _uncounted)
    if first:
        for name, method in _COUNTED.items():
            _replace_everywhere(name, _uncounted[name], _counting(name, method))
        print_once(
            f"S2: throughput counts attended pairs (patched in megatron.training.training: {', '.join(_COUNTED)})"
        )
    return _accounting


_loss_log: LossLog | None = None
_logging = False


def install_loss_log(path: str | Path | None) -> None:
    """Has Megatron's training loop append its losses to `path`, log the losses by position where they are added up
    (`measure_position_loss`), and say so where no target counted (`count_targets`); nothing without all three.

    `training_log` is where every iteration's losses pass before they are rounded and averaged. `evaluate` returns those
    of an evaluation without its name, which only its caller `evaluate_and_print_results` is told.
    Raises ValueError when this process already logs to another path, or another process to this one.
    """
    global _loss_log, _logging
    if path is not None:
        path = Path(path).absolute()
        if _loss_log is not None and _loss_log.path != path:
            raise ValueError(
                f"--s2-loss-log={path}: this process already logs to {_loss_log.path}; expected one path; drop one"
            )
        _loss_log = _loss_log or LossLog(path, run_header)
        logger.info("losses are appended to %s", path)
    if _logging or (path is None and position_loss() is None and counted_targets() is None):
        return
    _logging = True

    from megatron.training import training

    training_log, evaluate = training.training_log, training.evaluate
    evaluate_and_print_results = training.evaluate_and_print_results
    signature = inspect.signature(training_log)
    evaluated = {}  # the iteration and the name of the evaluation that runs
    suffixes: list[str] = []  # of the validation sets that it has not come to, as Megatron names them

    @functools.wraps(training_log)
    def logged_training_log(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given, positions = call.arguments, read_position_loss(TRAIN)
        iteration, losses = given["iteration"], given["loss_dict"]
        given["loss_dict"] = kept = losses_of_step(losses, iteration)
        if _loss_log is not None:
            record = {"iteration": iteration} | {name: exact_number(kept.get(name)) for name in losses}
            record |= {name: exact_number(given[name]) for name in ("grad_norm", "learning_rate")}
            record |= {"skipped": given["skipped_iter"]} | progress() | as_record(positions)
            _loss_log.append(record)
        result = training_log(*call.args, **call.kwargs)
        report_position_loss(positions, iteration)
        return result

    @functools.wraps(evaluate)
    def logged_evaluate(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        positions = read_position_loss(EVALUATE)
        if evaluated and result[0] is not None:
            kept = losses_of_evaluation(result[0], evaluated["validation"])
            losses, result = {name: exact_number(kept.get(name)) for name in result[0]}, (kept, *result[1:])
            if _loss_log is not None:
                _loss_log.append(evaluated | losses | as_record(positions))
            suffix = suffixes.pop(0) if suffixes else ""
            if "test set" not in evaluated["validation"]:  # Megatron gives both the same name
                report_position_loss(positions, evaluated["iteration"], f" validation{suffix}")
        return result

    @functools.wraps(evaluate_and_print_results)
    def logged_evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs):
        evaluated.update(iteration=iteration, validation=prefix)
        suffixes[:] = validation_suffixes(data_iterator)
        try:
            return evaluate_and_print_results(
                prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs
            )
        finally:
            evaluated.clear()

    training.training_log = logged_training_log
    training.evaluate = logged_evaluate
    training.evaluate_and_print_results = logged_evaluate_and_print_results


_keeps_outputs = False


def keep_attention_outputs() -> None:
    """Lets attention know in which checkpointed call it runs (ops/recompute.py), of Megatron's own activation
    checkpoints and those of Transformer Engine, which it takes under fp8 and fp4."""
    global _keeps_outputs
    if _keeps_outputs:
        return
    _keeps_outputs = True

    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import random

    for name, stock in (("checkpoint", random.checkpoint), ("te_checkpoint", transformer_engine.te_checkpoint)):
        _replace_everywhere(name, stock, functools.partial(_keeping, stock))


def _keeping(checkpoint, function, *args, **kwargs):
    return checkpoint(keep_outputs(function), *args, **kwargs)


_asks_layer_spec = False


def use_own_mtp_specs() -> None:
    """Lets a layer spec that has a method `mtp_block` make the multi-token-prediction layers too.

    GPTModelBuilder asks the spec of GPTModelConfig for the decoder's layers only; the others it makes by itself, from
    Megatron's dense layer. Models with another layer spec are built as before.
    """
    from megatron.training.models import gpt

    global _asks_layer_spec
    if _asks_layer_spec:
        return
    _asks_layer_spec, stock = True, gpt.mtp_block_spec

    @functools.wraps(stock)
    def mtp_block_spec(config, transformer_layer_spec, vp_stage: int | None = None):
        block = stock(config, transformer_layer_spec, vp_stage=vp_stage)
        own = getattr(config.transformer_layer_spec, "mtp_block", None)
        return block if block is None or own is None else own(config, block, vp_stage)

    gpt.mtp_block_spec = mtp_block_spec


# Modules that write checkpoints in processes of their own, and the processes' functions: Megatron's, and those of
# nvidia-resiliency-ext where that is installed.
_RESULT_QUEUES = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
_WORKERS = (
    ("megatron.core.dist_checkpointing.strategies.async_utils", "PersistentAsyncCaller", "async_loop"),
    ("nvidia_resiliency_ext.checkpointing.async_ckpt.core", "PersistentAsyncCaller", "async_loop"),
    ("nvidia_resiliency_ext.checkpointing.async_ckpt.core", "PersistentAsyncCaller", "async_loop_for_daemon_worker"),
)
_guarded = False


def guard_processes() -> None:
    """Ends every process that training starts when this one ends, and this one when its torchrun does.

    Replaces where Megatron starts processes without a fork: the server of the queue for write results, and the
    persistent writer.
    """
    global _guarded
    if _guarded:
        return
    _guarded = True
    end_with_torchrun()
    end_forks_with_this_process()
    end_daemons_with_this_process()

    for name in _RESULT_QUEUES:
        if (module := _imported(name)) is not None:
            module.get_write_results_queue = functools.partial(_write_results_queue, module)
    for name, owner, function in _WORKERS:
        if (module := _imported(name)) is not None and hasattr(getattr(module, owner), function):
            worker = functools.partial(call_with_parent, name, f"{owner}.{function}")
            setattr(getattr(module, owner), function, staticmethod(worker))


def _imported(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:  # not installed, or a release without this module
        return None


def _write_results_queue(module, mp_mode: str = "spawn"):
    if module._results_queue is None:
        module._results_queue = start_manager(multiprocessing.get_context(mp_mode)).Queue()
    return module._results_queue


_hooks: CheckpointHooks | None = None


def install_checkpoint_hooks(args: Namespace, sparsity: ResolvedSparsity | None) -> CheckpointHooks:
    """Has Megatron call CheckpointHooks around its saving and loading. Calling again replaces the hooks' object only.

    args: Megatron's. sparsity: of this run, None for a dense one.
    """
    global _hooks
    first, _hooks = _hooks is None, CheckpointHooks(args, sparsity)
    if not first:
        return _hooks

    from megatron.training import checkpointing, training

    save, schedule = training.save_checkpoint, checkpointing.schedule_async_save
    finalize, load_base = training.maybe_finalize_async_save, checkpointing._load_base_checkpoint
    load_local, setup = checkpointing._load_non_persistent_base_checkpoint, training.setup_model_and_optimizer

    @functools.wraps(save)
    def hooked_save(iteration, *args, non_persistent_ckpt=False, **kwargs):
        with _hooks.one_line_for_the_disk():
            _hooks.before_save(iteration, non_persistent_ckpt)
            result = save(iteration, *args, non_persistent_ckpt=non_persistent_ckpt, **kwargs)
        if not _hooks.args.async_save:
            _hooks.when_saved()()
        return result

    @functools.wraps(schedule)
    def hooked_schedule(async_request):
        if async_request.finalize_fns:  # a request for logits takes over those of the checkpoint before it
            async_request.add_finalize_fn(_hooks.when_saved())
        return schedule(async_request)

    @functools.wraps(finalize)
    def hooked_finalize(*args, **kwargs):
        with _hooks.one_line_for_the_disk():
            return finalize(*args, **kwargs)

    @functools.wraps(load_base)
    def hooked_load_base(*args, **kwargs):
        state, name, release, kind = load_base(*args, **kwargs)
        if state is not None:
            _hooks.after_load(name, kind)
        return state, name, release, kind

    @functools.wraps(load_local)
    def hooked_load_local(folder, args, rank0, sharded_state_dict, iteration, *rest, **kwargs):
        if args.non_persistent_ckpt_type != "local":
            return load_local(folder, args, rank0, sharded_state_dict, iteration, *rest, **kwargs)
        with _hooks.one_line_for_a_local_copy(iteration):
            loaded = load_local(folder, args, rank0, sharded_state_dict, iteration, *rest, **kwargs)
        _hooks.local_loaded(loaded[0])
        return loaded

    @functools.wraps(setup)
    def hooked_setup(*args, **kwargs):
        result = setup(*args, **kwargs)
        _hooks.model_ready()
        return result

    training.save_checkpoint, checkpointing.schedule_async_save = hooked_save, hooked_schedule
    training.maybe_finalize_async_save, checkpointing._load_base_checkpoint = hooked_finalize, hooked_load_base
    checkpointing._load_non_persistent_base_checkpoint = hooked_load_local
    training.setup_model_and_optimizer = hooked_setup
    return _hooks


_checks_model = False


def install_model_check() -> None:
    """Has Megatron refuse a dense model under --s2-config, which a script without `apply_s2` builds, and build every
    model with --rope-scaling-factor. Installed where --s2-config is parsed, so that it holds for such a script too."""
    global _checks_model
    if _checks_model:
        return
    _checks_model = True

    from megatron.training import training
    from megatron.training.global_vars import get_args

    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def checked_setup(*args, **kwargs):
        from s2_megatron.megatron.model.check import check_model

        container = kwargs.get("cfg_container")
        if getattr(container, "model", None) is not None:
            set_rope_scaling(get_args(), container.model)
        result = setup(*args, **kwargs)
        check_model(get_args().s2_config, None if _hooks is None else _hooks.sparsity, result[0])
        check_rope_scaling(get_args(), result[0])
        return result

    training.setup_model_and_optimizer = checked_setup
