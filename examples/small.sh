# Sourced by the small examples: a GPT that two CPU cores train in seconds, its data, and how a run is started and shown.
# `--s2-config` and whatever an example is about stand in the example itself.
#
#   ITERATIONS=60       how far each run is trained
#   RUNS=/big/disk      where logs and checkpoints go (runs/examples)
#   PYTHON=python3.12   the Python to run with (that of PATH if it has torch and Megatron, else .venv's)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RUNS=${RUNS:-runs/examples}
source examples/checks.sh
require_folder RUNS
require_count ITERATIONS 60
require_megatron
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=1

SMALL=(
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 256 --max-position-embeddings 32768
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --init-method-std 0.05 --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 4 --global-batch-size 4 --lr 4e-3 --lr-decay-style constant --lr-decay-iters 1000 --lr-warmup-iters 5
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
    --data-path "$RUNS/corpus/text" --data-cache-path "$RUNS/corpus/cache" --split 95,5,0
    --tokenizer-type NullTokenizer --vocab-size 256
    --eval-interval 1000000 --eval-iters 8 --save-interval 1000000 --ckpt-format torch_dist
    --transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-create-attention-mask-in-dataloader
    --log-interval 1 --log-throughput
)
if nvidia-smi -L > /dev/null 2>&1; then SMALL+=(--bf16); else SMALL+=(--distributed-backend gloo --num-workers 0); fi

# Of everything that Megatron prints: what S2 says at start-up, and the losses. The whole output is in the log.
SHOWN='
/^[│┃┏┡└]|^S2|^  layers? [0-9]|layers together cover/ && !/throughput counts/ { print "    " $0 }
/ iteration +[0-9]+\/.* lm loss: / {
    match($0, /iteration +[0-9]+\/ *[0-9]+/); split(substr($0, RSTART + 9, RLENGTH - 9), at, "/")
    match($0, /lm loss: [^ ]+/); loss = substr($0, RSTART + 9, RLENGTH - 9)
    if (at[1] == 1 || at[1] % 10 == 0) printf "    iteration %d of %d: loss %.4f\n", at[1], at[2], loss
}
/validation loss at iteration/ {
    match($0, /lm loss value: [^ ]+/); printf "    validation loss: %.4f\n", substr($0, RSTART + 15, RLENGTH - 15)
}
{ fflush() }'

# train NAME PROCESSES SCRIPT FLAG...: torchrun SCRIPT with the small model and these flags; $RUNS/NAME gets the loss log,
# the TensorBoard files and the whole output.
train() {
    local name=$1 processes=$2 script=$3 folder=$RUNS/$1
    shift 3
    "$PYTHON" -m examples.small_corpus "$RUNS/corpus"
    rm -rf "$folder" && mkdir -p "$folder"
    echo "$name: torchrun --nproc-per-node $processes $script \"\${SMALL[@]}\" $*"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" "$script" "${SMALL[@]}" \
        --tensorboard-dir "$folder/tensorboard" "$@" 2>&1 | tee "$folder/train.log" | awk "$SHOWN" ||
        train_failed "$name" "$folder/train.log"
}

# train_failed NAME LOG: a refused setting is one line, which torchrun's report hides; of anything else the end of the log.
train_failed() {
    if grep -m 1 '^error: ' "$2" >&2; then exit 2; fi
    tail -n 30 "$2" >&2
    echo "error: $1 failed; $2 has its output" >&2
    exit 1
}

# validation_loss NAME: the last one of that run.
validation_loss() {
    printf '%.4f' "$(sed -nE 's/.*validation loss at iteration .*lm loss value: ([^ ]+) .*/\1/p' "$RUNS/$1/train.log" | tail -n 1)"
}
