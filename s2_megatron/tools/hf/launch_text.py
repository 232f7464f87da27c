"""The launch line that import-hf prints, whole and runnable as it is, and the script that is this line."""

from __future__ import annotations

import shlex
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

TOKENIZER = "HuggingFaceTokenizer"  # Megatron's name of one in a Hugging Face folder
WIDTH = 110
SCRIPT = "train.sh"  # in the folder that import-hf makes
PLAN = "windows.yaml"  # beside it, for a model whose layers have windows
TRAINING, MOCK = "pretrain_gpt_s2.py", "--mock-data"
SEQ_LENGTH = 4096  # or less, where the model was not trained so far
WITHOUT_TRANSFORMER_ENGINE = (
    "--transformer-impl=local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion"
)

_SCRIPT = """\
#!/usr/bin/env bash
# Trains the model beside this file on; s2-megatron import-hf made it. Start it where pretrain_gpt_s2.py lies. The flags
# that it is given are added, and the last of equal ones counts:
#   train.sh --data-path PREFIX --split 99,1,0 --s2-config chosen.yaml --save runs/sparse
# The same command again goes on from the newest checkpoint in --save.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f pretrain_gpt_s2.py ]]; then
    echo "error: train.sh: no pretrain_gpt_s2.py in $PWD; expected the checkout of s2-megatron; cd there first" >&2
    exit 2
fi
data=(--mock-data) load= save=$here-trained before=
for flag in "$@"; do
    case $flag in
        --*data-path | --*data-path=* | --*data-args-path | --*data-args-path=* | --mock-data) data=() ;;
        --load | --load=*) load=given ;;
        --save=*) save=${flag#*=} ;;
    esac
    if [[ $before == --save ]]; then save=$flag; fi
    before=$flag
done
weights=(--load="$here" --finetune)
if [[ -n $load ]]; then
    weights=()
elif [[ -f $save/latest_checkpointed_iteration.txt ]]; then
    weights=(--load="$save")
    echo "train.sh: goes on from $save" >&2
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
"""


def plan_flag(output: Path) -> str:
    """The flag that gives a model its own windows."""
    return f"--s2-config={output / PLAN}"


def launch_words(output: Path, flags: list[str], stored: Namespace, words_known: int, processes: int) -> list[str]:
    """The words of a launch on this machine. flags: the model's. stored: the arguments in the checkpoint. words_known:
    rows of the embedding that are words; a mock token in one of the zeros behind them has gradients of 1e13. processes:
    of this node; 0: there is no GPU."""
    length = min(SEQ_LENGTH, stored.max_position_embeddings)
    words = ["torchrun", f"--nproc-per-node={max(1, processes)}", TRAINING]
    words += [f"--load={output}", "--finetune", f"--save={output}-trained", "--save-interval=100"]
    words += flags
    if stored.tokenizer_type == TOKENIZER:
        words += [f"--tokenizer-type={TOKENIZER}", f"--tokenizer-model={stored.tokenizer_model}"]
    else:
        words += ["--tokenizer-type=NullTokenizer", f"--vocab-size={max(1, words_known - 1)}"]  # and its end of text
    words += [MOCK, f"--seq-length={length}", "--no-create-attention-mask-in-dataloader"]
    words += ["--micro-batch-size=1", f"--global-batch-size={8 * max(1, processes)}", "--train-iters=1000"]
    words += ["--lr=1e-5", "--min-lr=1e-6", "--lr-decay-style=cosine", "--lr-warmup-iters=20", "--weight-decay=0.1"]
    words += ["--clip-grad=1.0", "--eval-iters=10", "--eval-interval=100", "--log-interval=1"]
    if find_spec("transformer_engine") is None:
        words += WITHOUT_TRANSFORMER_ENGINE.split()
    elif find_spec("fused_weight_gradient_mlp_cuda") is None:  # of NVIDIA's Apex; Megatron's output layer asks for it
        words += ["--no-gradient-accumulation-fusion"]
    return [*words, *(["--bf16"] if processes else ["--distributed-backend=gloo", "--num-workers=0"])]


def launch_here(output: Path, flags: list[str], stored: Namespace, words_known: int) -> list[str]:
    """launch_words, for the GPUs that are here."""
    from s2_megatron.megatron.host.cuda_on_cpu import compute_device

    if compute_device().type == "cpu":
        processes = 0
    else:
        import torch

        processes = torch.cuda.device_count()
    return launch_words(output, flags, stored, words_known, processes)


def launch_text(output: Path, words: list[str], *, sparse: bool) -> str:
    """What import-hf prints: how the imported model is trained on. words: of launch_here. sparse: it has a sparsity of
    its own."""
    its_own = ""
    if sparse:
        given = plan_flag(output) in words
        its_own = f" in place of {PLAN}, its own windows" if given else ", the one that it was trained with"
    return (
        f"Train it on with `{shlex.quote(str(output / SCRIPT))} --data-path PREFIX --save FOLDER`, for S2-Attention "
        f"also `--s2-config YAML`{its_own}; it adds its flags to this line, whose data are random tokens:\n"
        + _lines(["CUDA_DEVICE_MAX_CONNECTIONS=1", *map(shlex.quote, words)])
    )


def launch_script(output: Path, words: list[str]) -> str:
    """The content of SCRIPT. words: of launch_here."""
    torchrun, processes, script, *flags = words
    assert torchrun == "torchrun" and script == TRAINING and MOCK in flags
    own = [f"--load={output}", "--finetune", f"--save={output}-trained", MOCK]
    assert set(own) <= set(flags)
    plan = [f'--s2-config="$here/{PLAN}"'] if plan_flag(output) in flags else []
    own += [plan_flag(output)] if plan else []
    flags = [shlex.quote(flag) for flag in flags if flag not in own]
    command = ['exec "${PYTHON:-python}" -m torch.distributed.run --standalone', processes, script]
    added = [*plan, '"${weights[@]}"', '--save="$here-trained"', '"${data[@]}"', '"$@"']
    return _SCRIPT + _lines([*command, *flags, *added]) + "\n"


def _lines(words: list[str]) -> str:
    """One command over several lines, for a shell."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)
