"""The launch line that import-hf prints, whole and runnable as it is, and the script that is this line."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from s2_megatron.config.errors import printable
from s2_megatron.tools.forecast.fit import fitting, peak_gib
from s2_megatron.tools.room import gpus_here

TOKENIZER = "HuggingFaceTokenizer"  # Megatron's name of one in a Hugging Face folder
WIDTH = 110
SCRIPT = "train.sh"  # in the folder that import-hf makes
PLAN = "windows.yaml"  # beside it, for a model whose layers have windows
TRAINING, MOCK = "pretrain_gpt_s2.py", "--mock-data"
SEQ_LENGTH = 8192  # or less, where the model was not trained so far
WITHOUT_TRANSFORMER_ENGINE = (
    "--transformer-impl=local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion"
)

_SCRIPT = """\
#!/usr/bin/env bash
# Trains the model beside this file on; s2-megatron import-hf made it. Start it where pretrain_gpt_s2.py lies. The flags
# that it is given are added, and the last of equal ones counts:
#   train.sh --data-path PREFIX --split 99,1,0 --s2-config chosen.yaml --save runs/sparse
# The same command again goes on from the newest checkpoint in --save. Settings, as of examples/launch.sh: PYTHON,
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT (start it on every node; slurm/pretrain.sbatch does so),
# PREFLIGHT=0, DRY_RUN=1; and
#   LAYOUT   Megatron's flags in place of those that spread this model over GPUs ("": each GPU gets a whole copy)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f pretrain_gpt_s2.py || ! -f examples/checks.sh ]]; then
    echo "error: train.sh: no pretrain_gpt_s2.py in $PWD; expected the checkout of s2-megatron; cd there first" >&2
    exit 2
fi
source examples/checks.sh
for setting in CONFIG DATA_PATH TOKENIZER OUTPUT MOCK_DATA MOCK_VOCAB_SIZE WANDB_PROJECT; do
    [[ -z ${!setting+set} ]] || fail "$setting=${!setting} is no setting of train.sh; expected Megatron's flags behind \
it (--s2-config, --data-path, --save, --wandb-project); unset $setting"
done
for setting in DRY_RUN PREFLIGHT; do
    [[ ${!setting:-0} == [01] ]] || fail "$setting=${!setting}; expected 0 or 1; correct it"
done
require_count GPUS_PER_NODE 8
require_count NNODES 4
nodes=(--standalone)
if [[ ${NNODES:-1} != 1 ]]; then
    require NODE_RANK "number the nodes from 0 to $((NNODES - 1))"
    is_number "$NODE_RANK" 0 $((NNODES - 1)) || fail "NODE_RANK=$NODE_RANK; expected 0 to $((NNODES - 1)); correct it"
    require MASTER_ADDR "give the address of node 0"
    nodes=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"
           --master-port "${MASTER_PORT:-29500}")
fi
read -rd '' -a layout <<< "${LAYOUT-@LAYOUT@}" || true
data=(--mock-data) load= save= before=
for flag in "$@"; do
    case $flag in
        --*data-path | --*data-path=* | --*data-args-path | --*data-args-path=* | --mock-data) data=() ;;
        --load | --load=*) load=given ;;
        --save=*) save=${flag#*=} ;;
    esac
    if [[ $before == --save ]]; then save=$flag; fi
    before=$flag
done
output=()
if [[ -z $save ]]; then save=$here-trained output=(--save "$save"); fi
[[ ! $save -ef $here ]] || fail "--save $save holds the imported weights; expected another folder; give one"
weights=(--load="$here" --finetune)
if [[ -n $load ]]; then
    weights=()
elif [[ -f $save/latest_checkpointed_iteration.txt ]]; then
    weights=(--load="$save")
    echo "train.sh: goes on from $save" >&2
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
"""
_START = """\
if [[ ${DRY_RUN:-0} == 1 ]]; then
    if [[ ${PREFLIGHT:-1} == 1 ]]; then "$PYTHON" -m s2_megatron check@GPU@ -- "${command[@]}" >&2 || exit; fi
    printf '%s\\n' env "CUDA_DEVICE_MAX_CONNECTIONS=$CUDA_DEVICE_MAX_CONNECTIONS" "${command[@]}"
    exit
fi
if [[ ${PREFLIGHT:-1} == 1 ]]; then
    "$PYTHON" -m s2_megatron check --here --record -- "${command[@]}" > /dev/null || exit
fi
exec "${command[@]}"
"""


class Gpus(NamedTuple):
    """Of each node that trains. count: 0: there are none, and a CPU trains. gib: the memory of one. kind: its name,
    where they are not this machine's."""

    count: int
    gib: float | None
    kind: str = ""

    @property
    def engine(self) -> bool:
        """Whether Transformer Engine is there: here it is looked up, elsewhere it is expected."""
        return bool(self.kind) or find_spec("transformer_engine") is not None


def gpus_of(text: str | None) -> Gpus:
    """Those of import-hf's --train-on, such as 8xH100; without it this machine's. Raises ValueError."""
    from s2_megatron.tools.forecast.tables import NAMED, memory_gib

    if text is not None:
        count, _, kind = text.partition("x")
        gib = memory_gib(kind)
        if not re.fullmatch(r"[1-9]|1[0-6]", count) or gib is None:
            raise ValueError(
                f"--train-on {printable(text)}: expected the GPUs of one node, 1 to 16, x and one of "
                f"{', '.join(NAMED)}; use 8xH100, and NNODES where train.sh starts"
            )
        return Gpus(int(count), gib, kind)
    return Gpus(*gpus_here())


def plan_flag(output: Path) -> str:
    """The flag that gives a model its own windows."""
    return f"--s2-config={output / PLAN}"


def launch_words(output: Path, flags: list[str], stored: Namespace, words_known: int, gpus: Gpus) -> list[str]:
    """The words of a launch on one node, but for its layout. flags: the model's. stored: the arguments in the
    checkpoint. words_known: rows of the embedding that are words; a mock token in one of the zeros behind them has
    gradients of 1e13."""
    processes = gpus.count
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
    words += ["--exit-signal-handler"]
    if not gpus.engine:
        words += WITHOUT_TRANSFORMER_ENGINE.split()
    elif gpus.kind or find_spec("fused_weight_gradient_mlp_cuda") is None:
        # It is of NVIDIA's Apex, and Megatron's output layer asks for it.
        words += ["--no-gradient-accumulation-fusion"]
    return [*words, *(["--bf16"] if processes else ["--distributed-backend=gloo", "--num-workers=0"])]


def layout_of(words: list[str], vocabulary: int, gpus: Gpus) -> tuple[list[str], str]:
    """(flags that spread the model over these GPUs, what to print about it). words: of launch_words. vocabulary:
    padded."""
    if not gpus.count:
        return [], ""
    found = fitting(words, gpus.count, gpus.gib, vocabulary, engine=gpus.engine)
    if found is None and peak_gib(words, gpus.count, vocabulary) is None:
        return [], (
            "note: the memory of this model is not forecast, so train.sh gives each GPU a whole copy; LAYOUT takes the "
            "flags that spread it"
        )
    if found is None:
        return [], (
            f"note: no layout is known with which the training fits into {gpus.count} GPUs of {gpus.gib:.0f} GiB a "
            "node; train.sh gives each a whole copy"
        )
    runs = "with Transformer Engine, which it expects there" if gpus.kind else "without Transformer Engine"
    length = next(word.partition("=")[2] for word in words if word.startswith("--seq-length="))
    said = f"its training on {length} tokens takes about {found.gib:.0f} of {gpus.gib:.0f} GiB a GPU"
    if gpus.kind or not gpus.engine:
        said += f", {runs}"
    if found.nodes > 1:
        said += f", on {found.nodes} nodes of {gpus.count} GPUs: start train.sh with NNODES={found.nodes}, on each"
    return list(found.flags), said


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


def launch_script(output: Path, words: list[str], layout: list[str], kind: str = "") -> str:
    """The content of SCRIPT. words: of launch_words. layout: of layout_of. kind: of Gpus."""
    torchrun, processes, script, *flags = words
    assert torchrun == "torchrun" and script == TRAINING and MOCK in flags
    own = [f"--load={output}", "--finetune", f"--save={output}-trained", MOCK]
    assert set(own) <= set(flags)
    plan = [f'--s2-config="$here/{PLAN}"'] if plan_flag(output) in flags else []
    own += [plan_flag(output)] if plan else []
    flags = [shlex.quote(flag) for flag in flags if flag not in own]
    count = processes.partition("=")[2]
    command = [
        'command=("$PYTHON" -m torch.distributed.run "${nodes[@]}"',
        f'--nproc-per-node="${{GPUS_PER_NODE:-{count}}}"',
    ]
    added = ['"${layout[@]}"', *plan, '"${weights[@]}"', '"${output[@]}"', '"${data[@]}"', '"$@")']
    return (
        _SCRIPT.replace("@LAYOUT@", " ".join(layout))
        + _lines([*command, f'"$PWD/{script}"', *flags, *added])
        + "\n"
        + _START.replace("@GPU@", f" --gpu {shlex.quote(kind)}" if kind else "")
    )


def _lines(words: list[str]) -> str:
    """One command over several lines, for a shell."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)
