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
from s2_megatron.megatron.preflight.mistakes import MISTAKES, WRITTEN_FILES, WRITTEN_FOLDERS, WRITTEN_INTERVALS
from s2_megatron.megatron.preflight.values import NUMBERS, RANGES, flag_of
from tests.checkpoints import write_checkpoint
from tests.megatron.arguments import BASE, CONFIG
from tests.tools.bad_values import REFUSED_FLAGS, WRONG_PAIRS

GOOD = {**BASE, "--eval-interval": "10", "--num-workers": "0", "--s2-config": "{tmp}/config.yaml"}


class Bad(NamedTuple):
    """words: of the error line, in this order, `{tmp}` standing for the folder; none for Megatron's, which name one of
    the flags that are changed or left out. runner: in front of the flags."""

    changes: dict[str, str | list[str] | None]
    words: tuple[str, ...] = ()
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
    (tmp / "missing_data_args").write_text(f"1 {tmp}/good 1 {tmp}/none")
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

# Of every entry of MISTAKES in preflight/mistakes.py: a launch that makes the mistake (flags added).
MADE = {
    "validation_set_names": {"--validation-set-names": ["a", "b"]},
    "multiple_validation_sets and a test set": {"--multiple-validation-sets": None, "--full-validation": None},
    "no data to validate with": {"--split": "100,0,0"},
    "no tokenizer": {},
    "no eval_interval": {},
    "non_persistent_save_interval": {
        "--save": "{tmp}/save", "--save-interval": "10", "--non-persistent-save-interval": "2",
    },
    "use_persistent_ckpt_worker": {
        "--use-persistent-ckpt-worker": None, "--async-save": None, "--non-persistent-ckpt-type": "local",
    },
    "perform_initialization": {"--no-initialization": None},
    "init_model_with_meta_device": {"--init-model-with-meta-device": None},
    "full_validation": {"--full-validation": None},
    "stages of one process": {"--hybrid-layer-pattern": "*-*-|*-*-"},
    "rampup_batch_size": {"--rampup-batch-size": ["2", "2", "6"]},
    **{f"{name} without a folder": {flag_of(name): "2"} for name in WRITTEN_INTERVALS},
}  # fmt: skip
# Flags of GOOD that such a launch does not have.
LEFT_OUT = {"no tokenizer": ("--tokenizer-type",), "no eval_interval": ("--eval-interval",)}


def mistake(name: str) -> Bad:
    """The error line has what stands around the values in the entry's text."""
    said = MISTAKES[name].text
    words = (said.partition("{")[0], said.rpartition("; ")[2].partition("{")[0])
    return Bad(MADE[name], words, LEFT_OUT.get(name, ()))


# What Megatron refuses itself, when it validates its arguments or makes its configs.
MEGATRONS = {
    "moe_use_upcycling": Bad({"--moe-use-upcycling": None, "--num-experts": "2"}, ("--save option",)),
    "use_te_activation_func": Bad({"--use-te-activation-func": None, "--swiglu": None}),
    "fim_data": Bad({"--fim-data": None}, ("FIM dataset",)),
    **{name: Bad(flags) for name, flags in WRONG_PAIRS.items()},
}


# Flags without which Megatron's validation fails.
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings",
    "micro_batch_size", "lr")  # fmt: skip
SWITCHES = ("--use-nccl-ub", "--record-memory-history", "--optimizer-cuda-graph")
TWO_RANKS = "torchrun --nproc-per-node 2 pretrain_gpt_s2.py"
SAMPLES = ("--train-iters",)
# The batches, the learning rate and the weight decay, which preflight/schedule.py has Megatron go through; GOOD trains
# 10 iterations.
SCHEDULES = {
    "a batch": Bad({"--global-batch-size": "3"}, runner=TWO_RANKS),
    "a small batch": Bad({"--global-batch-size": "1", "--decrease-batch-size-if-needed": None}, runner=TWO_RANKS),
    "no steps of a batch": Bad({"--step-batch-size-schedule": "x"}),
    "late steps of a batch": Bad({"--step-batch-size-schedule": "1M:4"}),
    "a rate": Bad({"--lr": "-1"}),
    "an endless rate": Bad({"--lr": "inf"}, ("--lr=inf: out of its range; expected a finite number",)),
    "a NaN": Bad({"--clip-grad": "nan"}, ("--clip-grad=nan: expected a number",)),
    "the lowest rate": Bad({"--min-lr": "1"}),
    "the first rate": Bad({"--lr-warmup-init": "1"}),
    "a warm-up": Bad({"--lr-warmup-iters": "2000"}),
    "a warm-up as long": Bad({"--lr-warmup-iters": "10"}),
    "a short decay": Bad({"--lr-warmup-iters": "5", "--lr-decay-iters": "5"}),
    "a warm-up of samples": Bad({"--lr-warmup-samples": "40", "--train-samples": "40"}, without=SAMPLES),
    "a share of warm-up": Bad({"--lr-warmup-fraction": "1"}),
    "WSD": Bad({"--lr-decay-style": "WSD"}),
    "WSD of samples": Bad({"--lr-decay-style": "WSD", "--train-samples": "40", "--lr-wsd-decay-iters": "1"},
        without=SAMPLES),
    "a decay of weights": Bad({"--weight-decay": "-0.1"}),
    "falling weight decay": Bad({"--weight-decay-incr-style": "linear", "--start-weight-decay": "0.2",
        "--end-weight-decay": "0.1"}),
    "two schedules": Bad({"--override-opt-param-scheduler": None, "--use-checkpoint-opt-param-scheduler": None}),
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
    "other attention layers": Bad({"--hybrid-layer-pattern": "*-*-*-"}, ("config.yaml: layers (line 2): got 'DSSS', 4 "
        "names, for attention layers (*) among the 6 layers of --hybrid-layer-pattern *-*-*-: 3",), ("--num-layers",)),
    "no value": Bad({"--seq-length": None}, ("--seq-length: expected one argument",)),
    "yaml_cfg": Bad({"--yaml-cfg": "x.yaml"},
        ("--yaml-cfg makes Megatron drop every other flag", "remove --yaml-cfg")),
    "no window": Bad({"--s2-config": "window-size"}, ("--s2-config window-size without --window-size; expected",)),
    "keys behind the query": Bad(
        {"--s2-config": "window-size", "--window-size": "16,16"}, ("--window-size 16,16: expected two numbers",)),
    "a config twice": Bad({"--s2-config": ["{tmp}/config.yaml", "--s2-config", "x"]}, ("given twice",)),
    "a wrong config": Bad({"--s2-config": "{tmp}/wrong.yaml"}, ("specs.S.stride", "got 0; expected")),
    "a function": Bad({"--s2-config": "{tmp}/function.yaml"}, ("no Python pattern without permission",)),
    "local attention": Bad({"--attention-backend": "local"}),
    "no attention backend": Bad({"--attention-backend": "foo"},
        ("--attention-backend: invalid choice: 'foo' (choose from 'flash', 'fused', 'unfused', 'local', 'auto')",)),
    "no module for graphs": Bad({"--cuda-graph-modules": "foo"}, ("--cuda-graph-modules: invalid choice: 'foo'; ",)),
    "a bomb": Bad({"--moe-layer-freq": "[1]*999999999"},
        ("[1]*999999999: a pattern that is repeated 999999999 times",)),
    "Megatron's own word": Bad({"--num-query-groups": "3"}, ("error: ", "3")),
    "dropout": Bad({"--attention-dropout": "0.1"}, ("attention_dropout=0.1", "add --attention-dropout 0")),
    "a worker without a GPU": Bad({"--num-workers": "2"}, ("--num-workers 2 on a machine without a GPU; expected 0",)),
    "too many ranks": Bad({"--tensor-model-parallel-size": "4"},
        ("world size (2) is not divisible by total_model_size (total_model_size=4)",), runner=TWO_RANKS),
    "no connections": Bad({"--tensor-model-parallel-size": "2"},
        ("Megatron refuses this environment: ", "expected CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment"),
        runner="CUDA_DEVICE_MAX_CONNECTIONS=8 torchrun --nproc-per-node 2 pretrain_gpt_s2.py"),
    "no iterations": Bad({}, without=("--train-iters",)),
    "no interval": Bad({"--save": "{tmp}/save"}),
    # Data
    "no data": Bad({}, ("no data: --data-path is not given",), MOCK),
    "a data file": data("none", ".idx is missing"),
    "no index": data("no_index", ".idx is missing"),
    "no binary": data("no_data", ".bin is missing"),
    "a suffix": data("good.bin", ".idx is missing; the prefix has no suffix"),
    "another index": data("other_index", ".idx cannot be read: bad header, cannot read: "),
    "a cut index": data("cut_index", ".idx cannot be read: buffer is smaller"),
    "empty documents": data("empty_documents", "has 100 documents, and no token in any"),
    "an empty part": Bad(DATA | {"--data-path": "{tmp}/half_empty"}, ("of the 100 documents that have tokens",), MOCK),
    "cut data": data("cut_data", ".bin was cut: it has 19 of 20 bytes"),
    "other words": Bad(DATA | {"--data-path": "{tmp}/other_words"},
        ("--data-path={tmp}/other_words: has the token 60000, and the vocabulary ", "expected data of this"), MOCK),
    "one of two": Bad(DATA | {"--data-path": ["0.5", "{tmp}/good", "0.5", "{tmp}/none"]},
        ("--data-path={tmp}/none: ",), MOCK),
    "all of two": Bad(DATA | {"--data-path": ["{tmp}/no_index", "{tmp}/none"]}, ("(and 1 more of its 2)",), MOCK),
    "no list of data": Bad({"--data-args-path": "{tmp}/none"}, ("{tmp}/none: No such file or directory",), MOCK),
    "lists in no JSON": Bad({"--per-split-data-args-path": "{tmp}/data_args"}, ("JSONDecodeError in ",), MOCK),
    "a list of missing data": Bad({"--data-args-path": "{tmp}/missing_data_args"},
        ("--data-args-path={tmp}/missing_data_args={tmp}/none: .idx is missing",), MOCK),
    "a split": Bad(DATA | {"--split": "99:1"}, ("--split=99:1: expected up to three numbers",), MOCK),
    "a split that Megatron reads otherwise": Bad(DATA | {"--split": "1e-9,1,1"},
        ("--split=1e-9,1,1: expected up to three numbers in plain digits",), MOCK),
    "too few documents": Bad(DATA | {"--data-path": "{tmp}/few"}, ("--split=99,1,0 with --data-path={tmp}/few: its "
        "part for validation gets none of the 2 documents", "use --split 50,50,0"), MOCK),
    "too few documents for the default": Bad({"--data-path": "{tmp}/good"}, ("--split=969, 30, 1 (Megatron's default) "
        "with --data-path={tmp}/good: its part for test gets none of the 100 documents", "use --split 99,1,0"), MOCK),
    "no training part": Bad(DATA | {"--split": "0,1,0"}, ("--split=0,1,0: expected", "the first above 0"), MOCK),
    "sequences of wide tokens": Bad(
        DATA | {"--data-path": "{tmp}/wide", "--per-dataset-sequences-path": "{tmp}/right_counts"},
        ("--per-dataset-sequences-path with --data-path={tmp}/wide: its tokens have 4 bytes",), MOCK),
    # Tokenizer
    "no vocabulary": Bad({}, without=("--vocab-size",)),
    "a tokenizer's folder": Bad({"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "{tmp}/none"},
        ("Unable to instantiate HuggingFace AutoTokenizer for {tmp}/none",)),
    "a folder without one": Bad({"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "{tmp}/empty"},
        ("Unable to instantiate HuggingFace AutoTokenizer for {tmp}/empty",)),
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
    **{f"Megatron's: {name}": bad for name, bad in MEGATRONS.items()},
    **{f"{name} on a machine without its package": Bad(
        {flag_of(name): "2", "--save": "{tmp}/save", "--save-interval": "10"},
        (f"{flag_of(name)}=2: Transformer Engine is not installed",))
        for name in ("save_activations_interval", "save_dgrads_interval")},
    **{f"refused: {name}": Bad(changes, ("--s2-config: ", words)) for name, (changes, words) in REFUSED_FLAGS.items()},
    **{f"without {name}": Bad({}, without=(flag_of(name),)) for name in REQUIRED},
    **{f"{name} too small": Bad({flag_of(name): str(least - 1)},
        (f"{flag_of(name)}={least - 1}: expected {least} to {most}; use {flag_of(name)} {least}",))
        for name, (least, most) in RANGES.items()},
    **{f"{name} not taken": Bad({flag_of(name): "inf" if name == "lr" else "-1"},
        (f"{flag_of(name)}={'inf' if name == 'lr' else -1}: out of its range; expected {words}; use",))
        for name, (_, words, _) in NUMBERS.items()},
    **{f"{name} too large": Bad({flag_of(name): "9" * 25}, (f"{flag_of(name)}=99999", f"expected {least} to {most}"))
        for name, (least, most) in RANGES.items()},
    **{f"{name} in a file": Bad({flag_of(name): "{tmp}/file/x", "--save-interval": "10"},
        (f"{flag_of(name)}={{tmp}}/file/x: ", "is a file; expected a folder"))
        for name in (*WRITTEN_FOLDERS, *WRITTEN_FILES)},
}  # fmt: skip
