"""What a launch line can have wrong, and the line that is expected: data for test_check.py.

A bad launch is the good one (GOOD) with changes: {flag: value, None for a flag without one} and flags left out. The
folder `{tmp}` of the expectations has what `make_files` puts there. What follows from a table of the source is
generated from it, so that a new entry has its bad example; a flag of S2-Attention without one fails the test.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from s2_megatron.megatron.host.cuda_on_cpu import ON_GPUS_ONLY
from s2_megatron.megatron.preflight.combinations import CACHE_FLAGS, MISTAKES, WRITTEN_INTERVALS
from s2_megatron.megatron.preflight.files import READ_FILES, WRITTEN_FILES, WRITTEN_FOLDERS
from s2_megatron.megatron.preflight.flags import REQUIRED, flag_of
from s2_megatron.megatron.preflight.values import NUMBERS, PAIRS, RANGES
from tests.checkpoints import write_checkpoint
from tests.megatron.arguments import BASE, CONFIG
from tests.tools.bad_values import REFUSED_FLAGS, WRONG_PAIRS

GOOD = {**BASE, "--eval-interval": "10", "--num-workers": "0", "--s2-config": "{tmp}/config.yaml"}


class Bad(NamedTuple):
    """words: of the error line, in this order, `{tmp}` standing for the folder. runner: in front of the flags."""

    changes: dict[str, str | list[str] | None]
    words: tuple[str, ...]
    without: tuple[str, ...] = ()
    runner: str = "torchrun pretrain_gpt_s2.py"


# Files of --per-dataset-sequences-path, whose datasets have 100 documents.
SEQUENCES = {
    "right_counts": '{"{tmp}/good": [100, 101], "{tmp}/wide": [100, 101]}',
    "other_counts": '{"{tmp}/good": [99, 100]}',
    "one_count": '{"{tmp}/good": 100}',
    "other_datasets": '{"good": [100, 101]}',
    "a_list": "[100, 101]",
}


def make_files(tmp: Path) -> None:
    """The files and folders that the bad launches name."""
    (tmp / "config.yaml").write_text(CONFIG)
    (tmp / "wrong.yaml").write_text(CONFIG.replace("stride: 4", "stride: 0"))
    (tmp / "function.yaml").write_text("layers: P\nblock_size: 64\nspecs: {P: {function: 'a:b'}}\n")
    (tmp / "windows.yaml").write_text("layers: S\nblock_size: 16\nspecs: {S: {local_tokens: 32}}\n")
    (tmp / "file").write_text("a file")
    for name, text in SEQUENCES.items():
        (tmp / name).write_text(text.replace("{tmp}", str(tmp)))
    (tmp / "data_args").write_text(f"1 {tmp}/good")
    (tmp / "no_weights").write_text(f"0 {tmp}/good 0 {tmp}/good")
    for name in ("empty", "cache", "logits"):
        (tmp / name).mkdir()
    (tmp / "cache" / "0a1b-GPTDataset-train-document_index.npy").write_bytes(b"")
    (tmp / "logits" / "cp0_dp0__1.tar").write_bytes(b"")
    index, long_index = _index(2), _index(100)
    for name, head, data in (
        ("good", long_index, bytes(1000)),
        ("few", index, bytes(20)),
        ("empty_documents", _index(100, lengths=[0] * 100), b""),
        ("half_empty", _index(100, lengths=[5] * 10 + [0] * 90), bytes(100)),
        ("no_index", None, bytes(20)),
        ("no_data", index, None),
        ("other_index", b"something else entirely, and long enough", bytes(20)),
        ("cut_index", index[:40], bytes(20)),
        ("cut_data", index, bytes(19)),
        ("wide", _index(100, 4), bytes(2000)),
        ("other_words", long_index, struct.pack("<500H", *range(59501, 60001))),
    ):
        for suffix, content in ((".idx", head), (".bin", data)):
            if content is not None:
                (tmp / f"{name}{suffix}").write_bytes(content)
    for name in ("cut", "no_tracker", "bad_tracker", "no_arguments"):
        write_checkpoint(tmp / name, 75)
        write_checkpoint(tmp / name, 150, tracker=name != "no_tracker")
    (tmp / "cut" / "iter_0000150" / "__0_0.distcp").write_bytes(b"")
    (tmp / "bad_tracker" / "latest_checkpointed_iteration.txt").write_text("")


def _index(documents: int, token_bytes: int = 2, lengths: list[int] | None = None) -> bytes:
    """Of an indexed dataset of documents of 5 tokens, or these lengths, uint16 or int32."""
    fields = struct.pack("<QBQQ", 1, {2: 8, 4: 4}[token_bytes], documents, documents + 1)
    lengths = lengths or [5] * documents
    starts = [token_bytes * sum(lengths[:at]) for at in range(documents)]
    each = struct.pack(f"<{documents}i{documents}q{documents + 1}q", *lengths, *starts, *range(documents + 1))
    return b"MMIDIDX\x00\x00" + fields + each


DATA = {"--data-path": "{tmp}/good", "--split": "99,1,0"}
MOCK = ("--mock-data",)


def data(name: str, words: str) -> Bad:
    return Bad(DATA | {"--data-path": f"{{tmp}}/{name}"}, (f"--data-path={{tmp}}/{name}: {words}", "; expected "), MOCK)


# Of every flag of S2-Attention that takes a value: one that it does not take.
S2_FLAGS = {
    "--s2-config": Bad(
        {"--s2-config": "{tmp}/none.yaml"}, ("{tmp}/none.yaml: the file: got no such file", "nearest valid: ")
    ),
    "--s2-backend": Bad({"--s2-backend": "cudnn"}, ("--s2-backend: invalid choice: 'cudnn'", "--help")),
    "--s2-dense-core": Bad({"--s2-dense-core": "x"}, ("--s2-dense-core: invalid choice: 'x'",)),
    "--s2-cp-comm-type": Bad({"--s2-cp-comm-type": ["a2a", "a2a"]}, ("--s2-cp-comm-type a2a a2a: expected", "sparse")),
    "--s2-loss-log": Bad({"--s2-loss-log": "{tmp}"}, ("--s2-loss-log={tmp}: a folder or a device; expected a file",)),
    "--s2-loss-from-token": Bad({"--s2-loss-from-token": "x"}, ("--s2-loss-from-token: got 'x'; expected the id",)),
    "--s2-position-loss": Bad({"--s2-position-loss": "2000"}, ("--s2-position-loss 2000 with --seq-length",)),
}

# Of every entry of MISTAKES in preflight/combinations.py and of PAIRS in preflight/values.py: a launch that makes the
# mistake (flags added, flags left out).
MADE = {
    "validation_set_names": {"--validation-set-names": ["a", "b"]},
    "multiple_validation_sets": {"--multiple-validation-sets": None},
    "multiple_validation_sets and a test set": {"--multiple-validation-sets": None, "--full-validation": None},
    "no data to validate with": {"--split": "100,0,0"},
    "rerun_mode": {"--rerun-mode": "report_stats"},
    "enable_ft_package": {"--enable-ft-package": None},
    "use_persistent_ckpt_worker": {
        "--use-persistent-ckpt-worker": None,
        "--async-save": None,
        "--non-persistent-ckpt-type": "local",
    },
    "adlr_autoresume": {"--adlr-autoresume": None},
    "mock_data with data": {"--data-args-path": "{tmp}/data_args", "--split": "99,1,0"},
    "dataloader_fast_cache_load": {"--dataloader-fast-cache-load": None, **DATA, "--data-cache-path": "{tmp}/empty"},
    **{f"{name} without a folder": {flag: None} for name, flag in CACHE_FLAGS.items()},
    **{
        f"{name} without indices": {flag: None, "--data-cache-path": "{tmp}/empty"}
        for name, flag in CACHE_FLAGS.items()
    },
    "perform_initialization": {"--no-initialization": None},
    "init_model_with_meta_device": {"--init-model-with-meta-device": None},
    "init_model_with_meta_device and FSDP2": {"--init-model-with-meta-device": None, "--use-torch-fsdp2": None},
    "pad_vocab_size": {"--no-pad-vocab-size": None},
    "tokenizer_type": {"--tokenizer-type": "NullMultimodalTokenizer"},
    "data_args_path without a split": {"--data-args-path": "{tmp}/data_args"},
    "use_sharp": {"--use-sharp": None},
    "sft": {"--sft": None},
    "config_logger_dir": {"--config-logger-dir": "{tmp}/empty"},
    "full_validation": {"--full-validation": None},
    "no_persist_layer_norm": {"--transformer-impl": "local"},
    "fp32_residual_connection": {"--fp32-residual-connection": None, "--bf16": None},
    "dataloader_type": {"--dataloader-type": "external"},
    "optimizer": {"--optimizer": "muon"},
    "lazy_mpu_init": {"--lazy-mpu-init": None},
    "rl_profile": {"--rl-profile": None},
    "moe_layer_freq": {"--moe-layer-freq": "[1]", "--num-experts": "2"},
    "moe_use_upcycling": {"--moe-use-upcycling": None, "--num-experts": "2"},
    **{f"{name} without a folder": {flag_of(name): "2"} for name in WRITTEN_INTERVALS},
    **{
        name: {flag_of(name): "2", "--save": "{tmp}/save", "--save-interval": "10"}
        for name in ("save_activations_interval", "save_dgrads_interval")
    },
    "pipeline_model_parallel_comm_backend": {"--pipeline-model-parallel-comm-backend": "ucc"},
    "fault_injector": {"--fault-injector-ranks": "0"},
    "apply_layernorm_1p": {"--apply-layernorm-1p": None},
    "use_te_activation_func": {"--use-te-activation-func": None, "--swiglu": None},
    "logits_load_dir without logits": {"--logits-load-dir": "{tmp}/empty"},
    "logits_load_dir": {"--logits-load-dir": "{tmp}/logits"},
    "fim_data": {"--fim-data": None},
    "rotary_interleaved": {"--position-embedding-type": "yarn", "--rotary-interleaved": None},
    **WRONG_PAIRS,
}  # fmt: skip


# The flags of GOOD that such a launch does not have.
LEFT_OUT = {
    "no_persist_layer_norm": ("--no-persist-layer-norm",),
    "data_args_path without a split": MOCK,
    "dataloader_fast_cache_load": MOCK,
}


def mistake(name: str) -> Bad:
    """The error line has what stands around the values in the entry's text."""
    said = (MISTAKES | PAIRS)[name].text
    words = (said.partition("{")[0], said.rpartition("; ")[2].partition("{")[0])
    return Bad(MADE[name], words, LEFT_OUT.get(name, ()))


SWITCHES = ("--use-nccl-ub", "--record-memory-history", "--optimizer-cuda-graph")
TWO_RANKS = "torchrun --nproc-per-node 2 pretrain_gpt_s2.py"
SAMPLES = ("--train-iters",)
# The batches, the learning rate and the weight decay of preflight/schedule.py; GOOD trains 10 iterations.
SCHEDULES = {
    "a batch": Bad({"--global-batch-size": "3"}, ("--global-batch-size=3 with --micro-batch-size=1 and data "
        "parallelism over 2 ranks: expected a multiple of 2; use --global-batch-size 4",), runner=TWO_RANKS),
    "a small batch": Bad({"--global-batch-size": "1", "--decrease-batch-size-if-needed": None},
        ("--global-batch-size=1 ", "expected 2 or more", "use --global-batch-size 2"), runner=TWO_RANKS),
    "a batch that grows": Bad({"--rampup-batch-size": ["2", "2", "6"]},
        ("--rampup-batch-size=2 2 6: this Megatron ignores it", "use --step-batch-size-schedule")),
    "no steps of a batch": Bad({"--step-batch-size-schedule": "x"},
        ("--step-batch-size-schedule=x: ", "expected TOKENS:BATCH words", "'0:1 1B:2'")),
    "late steps of a batch": Bad({"--step-batch-size-schedule": "1M:4"}, ("--step-batch-size-schedule=1M:4: ",)),
    "a step of a batch": Bad({"--step-batch-size-schedule": "0:2 1M:3"},
        ("--step-batch-size-schedule=0:2 1M:3: a batch of 3 samples", "expected multiples of 2"), runner=TWO_RANKS),
    "no iteration of samples": Bad({"--train-samples": "3", "--global-batch-size": "4"},
        ("--train-samples=3 with a global batch of 4 samples: not one iteration", "use --train-samples 4"), SAMPLES),
    "a rate": Bad({"--lr": "-1"}, ("--lr=-1: expected a number, 0 or more",)),
    "an endless rate": Bad({"--lr": "inf"}, ("--lr=inf: expected a number",)),
    "a NaN": Bad({"--clip-grad": "nan"}, ("--clip-grad=nan: expected a number",)),
    "the lowest rate": Bad({"--min-lr": "1"}, ("--min-lr=1 with --lr=0.0001: expected 0 to --lr; use --min-lr 1e-05",)),
    "the first rate": Bad({"--lr-warmup-init": "1"}, ("--lr-warmup-init=1 with --lr=0.0001", "leave --lr-warmup-init")),
    "a warm-up": Bad({"--lr-warmup-iters": "2000"}, ("--lr-warmup-iters=2000 with --train-iters=10: ",
        "expected 0 to 9; use --lr-warmup-iters 1, or a larger --train-iters")),
    "a warm-up as long": Bad({"--lr-warmup-iters": "10"}, ("--lr-warmup-iters=10 with --train-iters=10",)),
    "a short decay": Bad({"--lr-warmup-iters": "5", "--lr-decay-iters": "5"}, ("--lr-warmup-iters=5 with "
        "--lr-decay-iters=5: ", "expected 0 to 4")),
    "a warm-up of samples": Bad({"--lr-warmup-samples": "40", "--train-samples": "40"},
        ("--lr-warmup-samples=40 with --train-samples=40: ", "use --lr-warmup-samples 4"), SAMPLES),
    "a share of warm-up": Bad({"--lr-warmup-fraction": "1"}, ("--lr-warmup-fraction=1: the share", "less than 1")),
    "no share": Bad({"--lr-warmup-fraction": "-0.1"}, ("--lr-warmup-fraction=-0.1: the share",)),
    "WSD": Bad({"--lr-decay-style": "WSD"}, ("--lr-decay-style=WSD without --lr-wsd-decay-iters", "add "
        "--lr-wsd-decay-iters 1")),
    "WSD of samples": Bad({"--lr-decay-style": "WSD", "--train-samples": "40", "--lr-wsd-decay-iters": "1"},
        ("--lr-decay-style=WSD without --lr-wsd-decay-samples",), SAMPLES),
    "a decay of weights": Bad({"--weight-decay": "-0.1"}, ("--weight-decay=-0.1: expected 0 or more",)),
    "falling weight decay": Bad({"--weight-decay-incr-style": "linear", "--start-weight-decay": "0.2",
        "--end-weight-decay": "0.1"}, ("--start-weight-decay=0.2 and --end-weight-decay=0.1: ", "swap them")),
    "two schedules": Bad({"--override-opt-param-scheduler": None, "--use-checkpoint-opt-param-scheduler": None},
        ("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler: ", "remove the other")),
    "an optimizer's numbers": Bad({"--exp-avg-dtype": "bf16"}, ("exp_avg_dtype can only be fp32",)),
    "graphs without a GPU": Bad({"--cuda-graph-impl": "local", "--s2-backend": "reference"},
        ("--cuda-graph-impl local on a machine without a GPU; expected none",), ("--s2-config",)),
    **{f"{flag} on a CPU": Bad({flag: None if flag in SWITCHES else "1"}, (f"{flag} on a machine without",))
        for flag in ON_GPUS_ONLY.values()},
}  # fmt: skip

BAD = {
    # The command line
    "no such flag": Bad({"--num-layer": "4"},
        ("unknown flag (Megatron 0.", "): --num-layer 4; did you mean --num-layers?")),
    "a variable": Bad({"--save": "$SAVE"}, ("launch line: $SAVE is a shell's variable; expected what it stands for",)),
    "variables": Bad({}, ("launch line: ${FLAGS[@]} is a shell's",), (), "torchrun pretrain_gpt.py ${FLAGS[@]}"),
    "no number": Bad({"--num-layers": "four"}, ("--num-layers: invalid int value: 'four'",)),
    "no value": Bad({"--seq-length": None}, ("--seq-length: expected one argument",)),
    "yaml_cfg": Bad({"--yaml-cfg": "x.yaml"},
        ("--yaml-cfg makes Megatron drop every other flag", "remove --yaml-cfg")),
    "a config twice": Bad({"--s2-config": ["{tmp}/config.yaml", "--s2-config", "x"]}, ("given twice",)),
    "a wrong config": Bad({"--s2-config": "{tmp}/wrong.yaml"}, ("specs.S.stride", "got 0; expected")),
    "a function": Bad({"--s2-config": "{tmp}/function.yaml"}, ("no Python pattern without permission",)),
    "local attention": Bad({"--attention-backend": "local"},
        ("--attention-backend=local: ", "--transformer-impl local")),
    "no attention backend": Bad({"--attention-backend": "foo"},
        ("--attention-backend: invalid choice: 'foo' (choose from 'flash', 'fused', 'unfused', 'local', 'auto')",)),
    "no module for graphs": Bad({"--cuda-graph-modules": "foo"}, ("--cuda-graph-modules: invalid choice: 'foo'; ",)),
    "a bomb": Bad({"--moe-layer-freq": "[1]*999999999"},
        ("[1]*999999999: a pattern that is repeated 999999999 times",)),
    "Megatron's own word": Bad({"--num-query-groups": "3"}, ("error: ", "3")),
    "dropout": Bad({"--attention-dropout": "0.1"}, ("attention_dropout=0.1", "add --attention-dropout 0")),
    "a worker without a GPU": Bad({"--num-workers": "2"}, ("--num-workers 2 on a machine without a GPU; expected 0",)),
    "too many ranks": Bad({"--tensor-model-parallel-size": "4"},
        ("--tensor-model-parallel-size=4: a model on 4 processes, and the job has 2", "start 4"),
        runner=TWO_RANKS),
    "experts on too many ranks": Bad({"--num-experts": "8", "--expert-model-parallel-size": "4"},
        ("--expert-model-parallel-size=4: experts on 4 processes, and the job has 2", "start 4"),
        runner=TWO_RANKS),
    "experts that are cut": Bad({"--tensor-model-parallel-size": "2", "--num-experts": "8",
        "--expert-model-parallel-size": "2"},
        ("--tensor-model-parallel-size=2 x --expert-model-parallel-size=2: experts on 4 processes, and the job has 2",
        "or add --expert-tensor-parallel-size 1"), runner=TWO_RANKS),
    "experts with a size of their own": Bad({"--tensor-model-parallel-size": "2", "--num-experts": "8",
        "--expert-tensor-parallel-size": "4"},
        ("--expert-tensor-parallel-size=4: experts on 4 processes, and the job has 2", "lower one of these"),
        runner=TWO_RANKS),
    "a size of no experts": Bad({"--expert-tensor-parallel-size": "3"},
        ("--expert-tensor-parallel-size=3: experts on 3 processes, and the job has 2", "start 3"),
        runner=TWO_RANKS),
    "experts on ranks that the model leaves": Bad({"--tensor-model-parallel-size": "2", "--context-parallel-size": "4",
        "--num-experts": "3", "--expert-model-parallel-size": "3"}, ("start 24, or lower one of these",),
        runner="torchrun --nproc-per-node 8 pretrain_gpt_s2.py"),
    "no connections": Bad({"--tensor-model-parallel-size": "2"},
        ("Megatron refuses this environment: ", "expected CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment"),
        runner="CUDA_DEVICE_MAX_CONNECTIONS=8 torchrun --nproc-per-node 2 pretrain_gpt_s2.py"),
    "no iterations": Bad({}, ("--train-iters is not given",), ("--train-iters",)),
    "no interval": Bad({"--save": "{tmp}/save"}, ("--save without --save-interval; expected both",)),
    "no kind of checkpoint": Bad(
        {"--save": "{tmp}/save", "--save-interval": "10", "--non-persistent-save-interval": "2"},
        ("--non-persistent-save-interval without --non-persistent-ckpt-type",)),
    "phases of iterations": Bad({"--phase-transition-iterations": "5,8"},
        ("--phase-transition-iterations=5,8 without --train-samples",)),
    "wandb without a name": Bad({"--wandb-project": "p"}, ("--wandb-project=p without a name", "add --wandb-exp-name")),
    # Data
    "no data": Bad({}, ("no data: --data-path is not given",), MOCK),
    "a data file": data("none", ".idx is missing"),
    "no index": data("no_index", ".idx is missing"),
    "no binary": data("no_data", ".bin is missing"),
    "a suffix": data("good.bin", ".idx is missing; the prefix has no suffix"),
    "another index": data("other_index", ".idx is no index of a Megatron dataset"),
    "a cut index": data("cut_index", ".idx was cut: it has 40 of 82 bytes"),
    "empty documents": data("empty_documents", "has 100 documents, and no token in any"),
    "an empty part": Bad(DATA | {"--data-path": "{tmp}/half_empty"}, ("of the 100 documents that have tokens",), MOCK),
    "cut data": data("cut_data", ".bin was cut: it has 19 of 20 bytes"),
    "other words": Bad(DATA | {"--data-path": "{tmp}/other_words"},
        ("--data-path={tmp}/other_words: has the token 60000, and the vocabulary ", "expected data of this"), MOCK),
    "one of two": Bad(DATA | {"--data-path": ["0.5", "{tmp}/good", "0.5", "{tmp}/none"]},
        ("--data-path={tmp}/none: ",), MOCK),
    "all of two": Bad(DATA | {"--data-path": ["{tmp}/no_index", "{tmp}/none"]}, ("(and 1 more of its 2)",), MOCK),
    "a list of data": Bad({"--data-args-path": "{tmp}/none", "--split": "99,1,0"},
        ("--data-args-path={tmp}/none: No such file",), MOCK),
    "parts of data": Bad({"--per-split-data-args-path": "{tmp}/file"}, ("not in Megatron's form; expected",), MOCK),
    "a split": Bad(DATA | {"--split": "99:1"}, ("--split=99:1: expected up to three numbers",), MOCK),
    "a split that Megatron reads otherwise": Bad(DATA | {"--split": "1e-9,1,1"},
        ("--split=1e-9,1,1: expected up to three numbers in plain digits",), MOCK),
    "too few documents": Bad(DATA | {"--data-path": "{tmp}/few"}, ("--split=99,1,0 with --data-path={tmp}/few: its "
        "part for validation gets none of the 2 documents", "use --split 50,50,0"), MOCK),
    "too few documents for the default": Bad({"--data-path": "{tmp}/good"}, ("--split=969, 30, 1 (Megatron's default) "
        "with --data-path={tmp}/good: its part for test gets none of the 100 documents", "use --split 99,1,0"), MOCK),
    "no training part": Bad(DATA | {"--split": "0,1,0"}, ("--split=0,1,0: expected", "the first above 0"), MOCK),
    **{f"weights: {weights}": Bad(DATA | {"--data-path": words.split()},
        (f"--data-path: the weights {weights}; expected numbers above 0",), MOCK)
        for weights, words in (
            ("0", "0 {tmp}/good"), ("nan", "nan {tmp}/good"), ("2 -1", "2 {tmp}/good -1 {tmp}/good"),
            ("0 1", "0 {tmp}/good 1 {tmp}/good"), ("inf 1", "inf {tmp}/good 1 {tmp}/good"),
        )},
    "weights of a part": Bad({"--train-data-path": ["0", "{tmp}/good", "0", "{tmp}/good"], "--eval-iters": "0"},
        ("--train-data-path: the weights 0 0; expected",), MOCK),
    "weights in a file": Bad({"--data-args-path": "{tmp}/no_weights", "--split": "99,1,0"},
        ("--data-args-path={tmp}/no_weights: the weights 0 0; expected",), MOCK),
    "a split of parts": Bad({"--train-data-path": "{tmp}/good", "--valid-data-path": "{tmp}/good", "--split": "99,1,0"},
        ("--split=99,1,0 with --train-data-path: there is one list of data for each part",), MOCK),
    **{f"sequences: {name}": Bad(DATA | {"--per-dataset-sequences-path": f"{{tmp}}/{name}"},
        (f"--per-dataset-sequences-path={{tmp}}/{name}: {words}",), MOCK)
        for name, words in (
            ("file", "no JSON; expected {prefix: [sequences, documents]}"),
            ("a_list", "no object of JSON"),
            ("other_datasets", "has no entry for {tmp}/good of --data-path; expected"),
            ("one_count", "has 100 for {tmp}/good; expected [100, 101]"),
            ("other_counts", "has [99, 100] for {tmp}/good; expected [100, 101]"),
        )},
    "sequences without data": Bad({"--per-dataset-sequences-path": "{tmp}/file"},
        ("--per-dataset-sequences-path={tmp}/file: no JSON",)),
    "sequences of wide tokens": Bad(
        DATA | {"--data-path": "{tmp}/wide", "--per-dataset-sequences-path": "{tmp}/right_counts"},
        ("--per-dataset-sequences-path with --data-path={tmp}/wide: its tokens have 4 bytes",), MOCK),
    # Tokenizer
    "no vocabulary": Bad({}, ("--tokenizer-type=NullTokenizer without --vocab-size",), ("--vocab-size",)),
    "no tokenizer": Bad({}, ("--vocab-file is not given, and --tokenizer-type GPT2BPETokenizer needs it",),
        ("--tokenizer-type",)),
    "a tokenizer's folder": Bad({"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "{tmp}/none"},
        ("--tokenizer-model={tmp}/none: no such file or folder",)),
    "a folder without one": Bad({"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "{tmp}/empty"},
        ("--tokenizer-model={tmp}/empty: no tokenizer in this folder; expected tokenizer.json",)),
    "a tokenizer's name": Bad({"--tokenizer-type": "WordTokenizer"}, ("WordTokenizer",)),
    # Checkpoints
    "an empty tracker": Bad({"--load": "{tmp}/bad_tracker"}, ("is empty; the newest complete checkpoint is of "
        "iteration 150; do: echo 150 > {tmp}/bad_tracker/latest_checkpointed_iteration.txt",)),
    "no tracker": Bad({"--load": "{tmp}/no_tracker"}, ("is missing; expected the number of an iteration", "echo 150")),
    "a cut shard": Bad({"--load": "{tmp}/cut"}, ("iter_0000150 __0_0.distcp has 0 of ", "do: echo 75 > ")),
    "a step": Bad({"--load": "{tmp}/cut", "--ckpt-step": "300"},
        ("--ckpt-step=300: iter_0000300 in {tmp}/cut does not",)),
    "no arguments": Bad({"--load": "{tmp}/no_arguments"}, ("the arguments in the checkpoint cannot be read",)),
    "a file to load": Bad({"--load": "{tmp}/file"}, ("--load={tmp}/file: a file; expected a folder",)),
    "finetune": Bad({"--finetune": None}, ("--finetune without --load: there is nothing to load",)),
    "a wrong folder": Bad({"--load": "{tmp}/empty", "--save": "{tmp}/other", "--save-interval": "5"},
        ("--load={tmp}/empty: no checkpoint there, and it is not the folder of --save", "random weights",
            "leave --load out")),
    "the folder of an iteration": Bad({"--load": "{tmp}/none/iter_0000005"}, ("--load={tmp}/none/iter_0000005: no "
        "checkpoint there", "give its parent and --ckpt-step 5")),
    "an unset variable": Bad({"--save": "", "--save-interval": "5"},
        ("--save is empty (an unset variable?); expected a path",)),
    "a token that is none": Bad({"--s2-loss-from-token": "600"}, ("--s2-loss-from-token=600: the vocabulary has no "
        "token above 512",)),
    "finetune from nothing": Bad({"--finetune": None, "--load": "{tmp}/empty"},
        ("--finetune with --load={tmp}/empty: no",)),
    "pretrained": Bad({"--pretrained-checkpoint": "{tmp}/empty"},
        ("--pretrained-checkpoint={tmp}/empty: no checkpoint",)),
    "its arguments": Bad({"--use-checkpoint-args": None}, ("--use-checkpoint-args without --load",)),
    "missing on purpose": Bad({"--exit-on-missing-checkpoint": None, "--load": "{tmp}/empty"},
        ("--exit-on-missing-checkpoint with --load={tmp}/empty",)),
    # The line itself
    "no line": Bad({}, ("launch line: 'ls -l",), runner="ls -l"),
    "no processes": Bad({}, ("--nproc-per-node='0'; expected a number of processes",),
        runner="torchrun --nproc-per-node 0 pretrain_gpt_s2.py"),
    **S2_FLAGS,
    **SCHEDULES,
    **{f"a mistake: {name}": mistake(name) for name in MADE},
    **{f"refused: {name}": Bad(changes, ("--s2-config: ", words)) for name, (changes, words) in REFUSED_FLAGS.items()},
    **{f"without {name}": Bad({}, (f"{flag_of(name)} is not given; expected a value",), (flag_of(name),))
        for name in REQUIRED},
    **{f"{name} too small": Bad({flag_of(name): str(least - 1)},
        (f"{flag_of(name)}={least - 1}: expected {least} to {most}; use {flag_of(name)} {least}",))
        for name, (least, most) in RANGES.items()},
    **{f"{name} not taken": Bad({flag_of(name): "-1"},
        (f"{flag_of(name)}=-1: out of its range; expected {words}; use {flag_of(name)} {example:g}",))
        for name, (_, words, example) in NUMBERS.items()},
    **{f"{name} too large": Bad({flag_of(name): "9" * 25}, (f"{flag_of(name)}=99999", f"expected {least} to {most}"))
        for name, (least, most) in RANGES.items()},
    **{f"{name} in a file": Bad({flag_of(name): "{tmp}/file/x", "--save-interval": "10"},
        (f"{flag_of(name)}={{tmp}}/file/x: ", "is a file; expected a folder"))
        for name in (*WRITTEN_FOLDERS, *WRITTEN_FILES)},
    **{f"{name} missing": Bad({flag_of(name): "{tmp}/none"},
        (f"{flag_of(name)}={{tmp}}/none: no file that this user can read",)) for name in READ_FILES},
}  # fmt: skip
