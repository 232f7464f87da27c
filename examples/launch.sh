# Sourced by the launchers beside it: everything that does not depend on the model's size. Settings are environment
# variables, so that one line starts a run on any machine:
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER=/data/tokenizer CONFIG=configs/s2_7b_mixed.yaml \
#       examples/pretrain_7b.sh
#
#   CONFIG           the sparsity YAML; or window-size, beside Megatron's --window-size
#   DATA_PATH        Megatron's --data-path: prefixes of indexed datasets, with weights when there are several
#   TOKENIZER        a Hugging Face tokenizer: its folder
#   MOCK_DATA=1      instead of the two: random tokens, to try a layout or measure a speed
#   OUTPUT           where checkpoints, TensorBoard files and the data cache go (runs/<name of CONFIG>)
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT     as torchrun has them
#   TRANSFORMER_IMPL transformer_engine or local; looked up when not set
#   PYTHON           the Python to run with (that of PATH if it has torch and Megatron, else .venv's)
#   WANDB_PROJECT    also log to Weights & Biases
#   DRY_RUN=1        check the run (s2-megatron check) and print the command, one argument a line; start nothing
#   PREFLIGHT=0      leave the check out; it takes seconds and also comes before every start
#
# Arguments of the launcher are added to the command line, where they win over its own.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/examples/checks.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}

# DRY_RUN=true must not start a run.
for name in DRY_RUN MOCK_DATA PREFLIGHT; do
    [[ ${!name:-0} == [01] ]] || fail "$name=${!name}; expected 0 or 1"
done
is_number "$NNODES" 1 65536 || fail "NNODES=$NNODES; expected 1 to 65536 nodes"
# Also of a single node: started on several without NNODES, each would train by itself into one folder.
is_number "${NODE_RANK:-0}" 0 $((NNODES - 1)) ||
    fail "NODE_RANK=$NODE_RANK; expected a number below NNODES=$NNODES; number the nodes from 0, or correct NNODES"
is_number "${MASTER_PORT:-29500}" 1024 65535 || fail "MASTER_PORT=$MASTER_PORT; expected 1024 to 65535, or leave it out"
[[ $GPUS_PER_NODE == @(gpu|auto|cpu) ]] || is_number "$GPUS_PER_NODE" 1 999999999 ||
    fail "GPUS_PER_NODE=$GPUS_PER_NODE; expected a number, 1 or more, or gpu for all"

# value_of NAME FLAG...: of the last flag of this name, 1 without one.
value_of() {
    local name=$1 value=1
    shift
    while [[ $# -gt 0 ]]; do
        [[ $1 != "$name" ]] || value=${2:-}
        [[ $1 != "$name="* ]] || value=${1#*=}
        shift
    done
    echo "$value"
}

# is_one_copy FLAG...: whether all GPUs hold one copy of the model, by tensor and pipeline ranks. A number of GPUs that
# torchrun finds, or that is wrong, is taken for several copies.
is_one_copy() {
    local tensor pipeline
    tensor=$(value_of --tensor-model-parallel-size "$@")
    pipeline=$(value_of --pipeline-model-parallel-size "$@")
    is_number "$GPUS_PER_NODE" 1 999999999 && is_number "$tensor" 1 999999 && is_number "$pipeline" 1 999999 &&
        [[ $((GPUS_PER_NODE * NNODES)) -le $((tensor * pipeline)) ]]
}

# launch FLAG...: adds the common flags and starts torchrun. MOCK_VOCAB_SIZE: the vocabulary of the mock data.
launch() {
    require CONFIG "name a sparsity YAML, e.g. CONFIG=configs/s2_7b_mixed.yaml"
    [[ $CONFIG == /* || $CONFIG == window-size || -f $CONFIG ]] || CONFIG=$ROOT/$CONFIG
    local output=${OUTPUT:-$ROOT/runs/$(basename "$CONFIG" .yaml)}

    local data=()
    if [[ ${MOCK_DATA:-0} == 1 ]]; then
        [[ -z ${DATA_PATH:-} ]] ||
            fail "DATA_PATH=$DATA_PATH; expected none beside MOCK_DATA=1, which trains on random tokens; unset one of them"
        data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$MOCK_VOCAB_SIZE")
    else
        require DATA_PATH "give the prefix of an indexed dataset (or MOCK_DATA=1)"
        require TOKENIZER "give the folder of a Hugging Face tokenizer (or MOCK_DATA=1)"
        # Several weighted datasets are separate arguments.
        local prefixes
        read -ra prefixes <<< "$DATA_PATH"
        data=(--data-path "${prefixes[@]}" --split 99,1,0 --data-cache-path "$output/data_cache"
              --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    fi

    [[ ${PREFLIGHT:-1} != 1 ]] || require_megatron
    local implementation=${TRANSFORMER_IMPL:-}
    if [[ -z $implementation ]]; then
        if "$PYTHON" -c 'import transformer_engine.pytorch' 2>/dev/null; then
            implementation=transformer_engine
        else
            implementation=local
        fi
        echo "TRANSFORMER_IMPL=$implementation (found by looking for Transformer Engine)" >&2
    fi
    local layers=(--transformer-impl "$implementation")
    case $implementation in
        transformer_engine)
            layers+=(--use-distributed-optimizer)
            # One data-parallel rank has nothing to overlap, and would wait for the norm of every bucket's gradients all
            # the same.
            if ! is_one_copy "$@" "${EXTRA_FLAGS[@]}"; then
                layers+=(--overlap-grad-reduce --overlap-param-gather)
            fi
            # Megatron's output layer is not Transformer Engine's: it takes this fusion from Apex and raises without it.
            # The extension is linked against torch's libraries, which have to be there first.
            if ! "$PYTHON" -c 'import torch, fused_weight_gradient_mlp_cuda' 2>/dev/null; then
                layers+=(--no-gradient-accumulation-fusion)
                echo "--no-gradient-accumulation-fusion (Apex's fused_weight_gradient_mlp_cuda cannot be imported)" >&2
            fi ;;
        local)
            # The fused kernels of these flags come with Transformer Engine or Apex. So does the only distributed
            # optimizer that Megatron can resume.
            layers+=(--no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion
                     --no-masked-softmax-fusion) ;;
        *)
            fail "TRANSFORMER_IMPL=$implementation; expected transformer_engine or local" ;;
    esac

    local logging=(--log-interval 10 --log-throughput --log-timers-to-tensorboard
                   --tensorboard-dir "$output/tensorboard")
    if [[ -n ${WANDB_PROJECT:-} ]]; then
        logging+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "$(basename "$output")" --wandb-save-dir "$output")
    fi

    local rendezvous=(--nproc-per-node "$GPUS_PER_NODE")
    if [[ $NNODES -gt 1 ]]; then
        require NODE_RANK "number the nodes from 0 to $((NNODES - 1))"
        require MASTER_ADDR "give the address of node 0"
        rendezvous+=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
                     --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
    else
        rendezvous+=(--standalone)
    fi

    local command=("$PYTHON" -m torch.distributed.run "${rendezvous[@]}" "$ROOT/pretrain_gpt_s2.py"
        --s2-config "$CONFIG"
        "$@"
        "${data[@]}" "${layers[@]}" "${logging[@]}"
        --no-create-attention-mask-in-dataloader
        --bf16
        --save "$output/checkpoints" --load "$output/checkpoints" --save-interval 1000 --ckpt-format torch_dist
        --eval-interval 1000 --eval-iters 10
        --exit-signal-handler
        --flight-recorder-dump-path "$output/flight_recorder"
        "${EXTRA_FLAGS[@]}")

    # Megatron overlaps tensor-parallel communication with compute by the order in which kernels are queued.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    # A mistake is one line and status 2 before any process is started; run_status.json says so, too.
    if [[ ${PREFLIGHT:-1} == 1 ]]; then
        local check=(env "PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m s2_megatron check)
        if [[ ${DRY_RUN:-0} == 1 ]]; then
            "${check[@]}" -- "${command[@]}" >&2 || exit
        else
            "${check[@]}" --here --record -- "${command[@]}" > /dev/null || exit
        fi
    fi
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        printf '%s\n' env "CUDA_DEVICE_MAX_CONNECTIONS=$CUDA_DEVICE_MAX_CONNECTIONS" "${command[@]}"
        return
    fi
    # Of torch: which rank did not come, when a collective times out (docs/context_parallel.md).
    mkdir -p "$output/flight_recorder"
    exec "${command[@]}"
}
