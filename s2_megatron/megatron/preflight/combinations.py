"""Flags that Megatron 0.19.2 parses and validates, and fails on when the model is built, trained, evaluated or saved.

A new one is an entry of MISTAKES, or of PAIRS in values.py if `inspect` reads its flags; tests/tools/bad_launches.py
needs a launch that makes it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from s2_megatron.megatron.checkpoints.folder import checkpoint_to_load
from s2_megatron.megatron.preflight.datasets import DEFAULT_SPLIT, split_shares
from s2_megatron.megatron.preflight.files import is_remote
from s2_megatron.megatron.preflight.mistake import Mistake, refuse_first


def _has_no(package: str) -> bool:
    return find_spec(package) is None


def _has_part(args: Namespace, part: int) -> bool:
    """Whether there is data to validate with (1), or to test with (2)."""
    shares = split_shares(args.split or DEFAULT_SPLIT)
    own = (args.train_data_path, args.valid_data_path, args.test_data_path)
    if args.per_split_data_args_path:
        return True  # the lists are in a file
    if any(own):
        return bool(own[part])
    return bool(shares[part:] and shares[part] > 0)


def _has_ucc() -> bool:
    import torch.distributed

    return torch.distributed.is_ucc_available()


def _is_local(folder: str | None) -> bool:
    return bool(folder) and not is_remote(folder)


def _loads_nothing(args: Namespace) -> bool:
    """Whether a training begins with the weights that its model was built with."""
    if args.skip_train or args.non_persistent_ckpt_type is not None:
        return False  # the latter may lie in the nodes' own folders
    given = [("--load", args.load, args.ckpt_step), ("--pretrained-checkpoint", args.pretrained_checkpoint, None)]
    return not any(
        folder and (is_remote(folder) or checkpoint_to_load(Path(folder), setting=flag, step=step))
        for flag, folder, step in given
    )


# Intervals at which Megatron writes tensors into the folder of --save.
WRITTEN_INTERVALS = (
    "save_params_interval",
    "save_activations_interval",
    "save_wgrads_interval",
    "save_dgrads_interval",
)
# With these Megatron reads the indices of datasets from --data-cache-path, and builds none.
CACHE_FLAGS = {
    "dataloader_fast_cache_load": "--dataloader-fast-cache-load",
    "dataloader_defer_npy_index_mmap": "--dataloader-defer-npy-index-mmap",
}

MISTAKES: dict[str, Mistake] = {
    "no data to validate with": Mistake(
        lambda args: bool(args.eval_iters or args.full_validation) and not _has_part(args, 1),
        "no validation data, and --eval-iters={eval_iters} (Megatron's default is 100) or --full-validation asks for "
        "it, at the end of the training at the latest; expected both or none; use --eval-iters 0 without "
        "--full-validation, or give the second part of --split (or --valid-data-path) some data",
        of_script=True,
    ),
    "validation_set_names": Mistake(
        lambda args: bool(args.validation_set_names) and not args.multiple_validation_sets,
        "--validation-set-names={validation_set_names}: expected --multiple-validation-sets beside it; add that, and "
        "--full-validation, or leave the names out",
    ),
    "multiple_validation_sets": Mistake(
        lambda args: args.multiple_validation_sets and not args.full_validation,
        "--multiple-validation-sets without --full-validation: expected both; add --full-validation",
    ),
    "full_validation": Mistake(
        lambda args: args.full_validation and not args.multiple_validation_sets,
        "--full-validation without --multiple-validation-sets: Megatron 0.19.2 fails at the first evaluation "
        "(training/training.py:4382); expected both; add --multiple-validation-sets, which takes a single set, too",
    ),
    "multiple_validation_sets and a test set": Mistake(
        lambda args: args.multiple_validation_sets and _has_part(args, 2),
        "--multiple-validation-sets with a test set: Megatron evaluates that as if it were several; expected none; "
        "give the third part of --split a 0, and no --test-data-path",
    ),
    "rerun_mode": Mistake(
        lambda args: args.rerun_mode == "report_stats",
        "--rerun-mode=report_stats: Megatron parses it and knows no such mode; expected another; use --rerun-mode "
        "validate_results",
    ),
    "enable_ft_package": Mistake(
        lambda args: args.enable_ft_package and _has_no("nvidia_resiliency_ext"),
        "--enable-ft-package: nvidia-resiliency-ext is not installed; expected it; pip install "
        "'nvidia-resiliency-ext>=0.6', or leave the flag out",
        of_machine=True,
    ),
    "use_persistent_ckpt_worker": Mistake(
        lambda args: args.use_persistent_ckpt_worker and args.non_persistent_ckpt_type == "local",
        "--use-persistent-ckpt-worker with --non-persistent-ckpt-type local: the model's tensors cannot be handed to "
        "that worker, and the first local checkpoint fails; expected one of the two; leave "
        "--use-persistent-ckpt-worker out (--async-save may stay)",
    ),
    "adlr_autoresume": Mistake(
        lambda args: args.adlr_autoresume and _has_no("userlib"),
        "--adlr-autoresume: its package userlib, of NVIDIA's own cluster, is not installed; expected it; leave the "
        "flag out, and resume with --save and --load in the same folder",
        of_machine=True,
    ),
    "mock_data with data": Mistake(
        lambda args: args.mock_data and bool(args.data_args_path or args.per_split_data_args_path) and not args.sft,
        "--mock-data with --data-args-path or --per-split-data-args-path: data that is made up, and data in files; "
        "expected one of the two; leave --mock-data out, or the list of data",
        of_script=True,
    ),
    "data_args_path without a split": Mistake(
        lambda args: bool(args.data_args_path) and args.data_path is None and args.split is None,
        "--data-args-path={data_args_path} without --split: which parts are for training, validation and test; "
        "expected both; add --split 99,1,0",
    ),
    "dataloader_fast_cache_load": Mistake(
        lambda args: args.dataloader_fast_cache_load and bool(args.data_path or args.data_args_path),
        "--dataloader-fast-cache-load with --data-path or --data-args-path: Megatron takes it only with one list of "
        "data for each part; expected --train-data-path; use --train-data-path and --valid-data-path, without --split",
        of_script=True,
    ),
    **{
        f"{name} without a folder": Mistake(
            lambda args, name=name: getattr(args, name) and args.data_cache_path is None,
            f"{flag} without --data-cache-path: the indices are read there, and none are built; expected both; add "
            "--data-cache-path with the folder of an earlier run",
            of_script=True,
        )
        for name, flag in CACHE_FLAGS.items()
    },
    **{
        f"{name} without indices": Mistake(
            lambda args, name=name: (
                getattr(args, name)
                and not args.sft
                and _is_local(args.data_cache_path)
                and not any(Path(args.data_cache_path).glob("*_index.npy"))
            ),
            f"{flag} with --data-cache-path={{data_cache_path}}: no dataset's indices there, and with this flag none "
            "are built; expected the folder of an earlier run with the same data, lengths and seed; start once without "
            f"{flag}",
            of_script=True,
        )
        for name, flag in CACHE_FLAGS.items()
    },
    "dataloader_type": Mistake(
        lambda args: args.dataloader_type == "external",
        "--dataloader-type=external: for a script whose datasets yield batches, and those of pretrain_gpt_s2.py yield "
        "samples; expected another; use --dataloader-type single, or cyclic",
        of_script=True,
    ),
    "optimizer": Mistake(
        lambda args: args.optimizer not in ("adam", "sgd") and _has_no("emerging_optimizers"),
        "--optimizer={optimizer}: the package emerging-optimizers is not installed; expected it; pip install "
        "emerging-optimizers, or use --optimizer adam",
        of_machine=True,
    ),
    "no_persist_layer_norm": Mistake(
        lambda args: args.transformer_impl == "local" and not args.no_persist_layer_norm and _has_no("apex"),
        "--transformer-impl local without NVIDIA Apex: torch's norms are used, which cannot persist; expected "
        "--no-persist-layer-norm; add it",
        of_machine=True,
    ),
    "fp32_residual_connection": Mistake(
        lambda args: args.transformer_impl == "local" and args.fp32_residual_connection and _has_no("apex"),
        "--fp32-residual-connection with --transformer-impl local: torch's norms leave activations in fp32 that the "
        "weights are not in; expected Transformer Engine's layers; use --transformer-impl transformer_engine, or leave "
        "--fp32-residual-connection out",
        of_machine=True,
    ),
    "sft": Mistake(
        lambda args: args.sft and _has_no("datasets"),
        "--sft: the package datasets, by which Megatron reads conversations, is not installed; expected it; pip "
        "install datasets",
        of_machine=True,
    ),
    "config_logger_dir": Mistake(
        lambda args: bool(args.config_logger_dir),
        "--config-logger-dir={config_logger_dir}: Megatron 0.19.2 copies its process groups to write them, and they "
        "cannot be; expected a run without it; leave the flag out: the checkpoints have the arguments",
    ),
    "perform_initialization": Mistake(
        lambda args: args.perform_initialization is False and _loads_nothing(args),
        "--no-initialization without a checkpoint to load: the weights would be what the memory holds; expected one; "
        "leave --no-initialization out, or add --load with the folder of a checkpoint",
        of_script=True,
    ),
    "init_model_with_meta_device and FSDP2": Mistake(
        lambda args: args.init_model_with_meta_device and args.use_torch_fsdp2,
        "--init-model-with-meta-device with --use-torch-fsdp2: Megatron 0.19.2 leaves the weights on that device, and "
        "the first step fails; expected one of the two; leave --init-model-with-meta-device out",
    ),
    "init_model_with_meta_device": Mistake(
        lambda args: args.init_model_with_meta_device and not args.use_megatron_fsdp and _loads_nothing(args),
        "--init-model-with-meta-device without a checkpoint to load and without --use-megatron-fsdp: Megatron 0.19.2 "
        "does not initialize such weights (training/training.py:1826), and they would be what the memory holds; "
        "expected one of the two; leave --init-model-with-meta-device out, or add --load with the folder of a "
        "checkpoint",
        of_script=True,
    ),
    "pad_vocab_size": Mistake(
        lambda args: args.pad_vocab_size is False and args.padded_vocab_size is None and not args.use_checkpoint_args,
        "--no-pad-vocab-size without --padded-vocab-size: Megatron 0.19.2 counts operations with that number "
        "(training/training.py:837), and there is none; expected both; leave --no-pad-vocab-size out, or add "
        "--padded-vocab-size with the model's vocabulary",
    ),
    "tokenizer_type": Mistake(
        lambda args: args.tokenizer_type == "NullMultimodalTokenizer",
        "--tokenizer-type=NullMultimodalTokenizer: a tokenizer of images, with which Megatron 0.19.2 builds no GPT "
        "dataset (core/datasets/megatron_dataset.py:67); expected one of text; use --tokenizer-type NullTokenizer",
        of_script=True,
    ),
    "lazy_mpu_init": Mistake(
        lambda args: args.lazy_mpu_init,
        "--lazy-mpu-init: the script is to start the process groups, and Megatron's training asks for them before it "
        "could; expected a run without it; leave the flag out",
    ),
    "rl_profile": Mistake(
        lambda args: args.rl_profile,
        "--rl-profile: for reinforcement learning, which this script does not do; expected a run without it; use "
        "--profile",
        of_script=True,
    ),
    "use_sharp": Mistake(
        lambda args: args.use_sharp and args.sharp_enabled_group in (None, "dp"),
        "--use-sharp: Megatron 0.19.2 asks for the data-parallel group before it has made it "
        "(core/parallel_state.py:1032); expected a run without it; leave the flag out",
    ),
    "moe_layer_freq": Mistake(
        lambda args: (
            isinstance(args.moe_layer_freq, list)
            and len(args.moe_layer_freq) != args.num_layers
            and args.num_experts is not None
            and not args.use_checkpoint_args  # which brings both
        ),
        "--moe-layer-freq={moe_layer_freq} with --num-layers={num_layers}: expected one number for each layer, 1 for "
        "experts; use --moe-layer-freq 1, or a list of that length",
    ),
    "moe_use_upcycling": Mistake(
        lambda args: args.moe_use_upcycling,
        "--moe-use-upcycling: Megatron 0.19.2 calls its own load_checkpoint with arguments that it does not have "
        "(training/training.py:2170); expected a model of experts from the start; leave the flag out",
    ),
    **{
        f"{name} without a folder": Mistake(
            lambda args, name=name: getattr(args, name) is not None and args.save is None,
            f"--{name.replace('_', '-')}={{{name}}} without --save: the tensors are written there; expected both; add "
            "--save FOLDER --save-interval 1000",
        )
        for name in WRITTEN_INTERVALS
    },
    **{
        name: Mistake(
            lambda args, name=name: getattr(args, name) is not None and _has_no("transformer_engine"),
            f"--{name.replace('_', '-')}={{{name}}}: Transformer Engine is not installed, and Megatron looks for its "
            "layers; expected it; pip install 'transformer-engine[pytorch]', or leave the flag out",
            of_machine=True,
        )
        for name in ("save_activations_interval", "save_dgrads_interval")
    },
    "pipeline_model_parallel_comm_backend": Mistake(
        lambda args: (
            args.pipeline_model_parallel_comm_backend == "ucc"
            and (not _has_ucc() or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1")
        ),
        "--pipeline-model-parallel-comm-backend=ucc: this PyTorch has no UCC, or CUDA_DEVICE_MAX_CONNECTIONS is 1, "
        "which Megatron refuses with it; expected NCCL, or UCC and more connections; leave the flag out, or "
        "export CUDA_DEVICE_MAX_CONNECTIONS=8",
        of_machine=True,
    ),
    "fault_injector": Mistake(
        lambda args: (
            not (args.fault_injector_ranks is None and args.fault_injector_num_ranks is None)
            and _has_no("nvidia_resiliency_ext")
        ),
        "--fault-injector-ranks or --fault-injector-num-ranks: nvidia-resiliency-ext, which injects the faults, is not "
        "installed; expected it; pip install 'nvidia-resiliency-ext>=0.6', or leave the flags out",
        of_machine=True,
    ),
    "apply_layernorm_1p": Mistake(
        lambda args: (
            args.transformer_impl == "local"
            and args.layernorm_zero_centered_gamma
            and (args.normalization == "RMSNorm" or _has_no("apex"))
        ),
        "--apply-layernorm-1p with --transformer-impl local: torch's norms, which it takes for RMSNorm and without "
        "NVIDIA Apex, have no such weights; expected Transformer Engine's layers; use --transformer-impl "
        "transformer_engine, or leave --apply-layernorm-1p out",
        of_machine=True,
    ),
    "use_te_activation_func": Mistake(
        lambda args: args.transformer_impl == "local" and args.use_te_activation_func and args.swiglu,
        "--use-te-activation-func with --transformer-impl local and --swiglu: those layers leave the gate of SwiGLU to "
        "an activation that they do not have; expected Transformer Engine's layers; use --transformer-impl "
        "transformer_engine, or leave --use-te-activation-func out",
    ),
    "logits_load_dir without logits": Mistake(
        lambda args: (
            _is_local(args.logits_load_dir)
            and not args.logits_load_ignore_errors
            and not any(Path(args.logits_load_dir).glob("cp*_dp*__*.tar"))
        ),
        "--logits-load-dir={logits_load_dir}: no teacher's logits there; expected a folder of cpN_dpN__N.tar files; "
        "name the one of --logits-save-dir, or leave the flag out",
    ),
    "logits_load_dir": Mistake(
        lambda args: (
            _is_local(args.logits_load_dir)
            and not args.logits_load_ignore_errors
            and (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0])
            != "fork"
        ),
        "--logits-load-dir={logits_load_dir}: Megatron 0.19.2 can start the process that reads it only by fork, which "
        "is not the default from Python 3.14 on; expected Python 3.12 or 3.13; use one of these, or leave the flag out",
        of_machine=True,
    ),
    "fim_data": Mistake(
        lambda args: args.fim_data and args.tokenizer_type == "NullTokenizer",
        "--fim-data with --tokenizer-type NullTokenizer: samples are cut as text, and its tokens are numbers; expected "
        "a tokenizer with the tokens of --fim-prefix-token and the like; use --tokenizer-type HuggingFaceTokenizer",
    ),
    "rotary_interleaved": Mistake(
        lambda args: args.position_embedding_type == "yarn" and args.rotary_interleaved,
        "--rotary-interleaved with --position-embedding-type yarn: Megatron's YaRN has no interleaved form; expected "
        "one of the two; leave --rotary-interleaved out, or use --position-embedding-type rope",
    ),
}


def check_combinations(args: Namespace, *, elsewhere: bool = False) -> None:
    """Raises ValueError for the first of MISTAKES. elsewhere: another machine than this one trains."""
    other = Path(sys.argv[0]).name != "pretrain_gpt_s2.py"
    looked_at = [
        mistake
        for mistake in MISTAKES.values()
        if not (elsewhere and mistake.of_machine) and not (other and mistake.of_script)
    ]
    refuse_first(args, looked_at)
