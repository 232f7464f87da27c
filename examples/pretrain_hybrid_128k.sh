#!/usr/bin/env bash
# A HybridModel of 1.5 billion parameters at 128K tokens on one GPU: twenty mixers with an MLP behind each, eighteen
# gated delta nets and two attention layers, in which S2-Attention stands. Needs Transformer Engine and
# flash-linear-attention.
#
#   MOCK_DATA=1 examples/pretrain_hybrid_128k.sh --train-iters 10 --lr-warmup-iters 1
#   CONFIG=configs/s2_1p3b_dense.yaml MOCK_DATA=1 examples/pretrain_hybrid_128k.sh --train-iters 10 --lr-warmup-iters 1
#
#   PATTERN          another stack, as Megatron's --hybrid-layer-pattern has it
#
# launch.sh lists the other settings.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

CONFIG=${CONFIG:-configs/s2_1p3b_s2.yaml}
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
MOCK_VOCAB_SIZE=32000
EXTRA_FLAGS=("$@")
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

MODEL=(
    --hybrid-layer-pattern "${PATTERN:-G-G-G-G-*-G-G-G-G-G-G-G-G-G-*-G-G-G-G-G-}"
    --hidden-size 2048
    --num-attention-heads 16
    --ffn-hidden-size 5632
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 10000
    --untie-embeddings-and-output-weights
    --seq-length 131072
    --max-position-embeddings 131072
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std 0.02
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size "${GLOBAL_BATCH_SIZE:-1}"
    --train-iters 100000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --seed 1234
    --s2-keep-attention-output
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl native
)

launch "${MODEL[@]}" "${TRAINING[@]}"
