#!/usr/bin/env bash
# A GPT of 7 billion parameters: 32 layers, hidden 4096, 32 heads. One node of 8 GPUs, tensor and sequence parallel.
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER=/data/tokenizer examples/pretrain_7b.sh
#   CONFIG=configs/s2_7b_dense.yaml MOCK_DATA=1 examples/pretrain_7b.sh --train-iters 50 --lr-warmup-iters 5
#
# launch.sh lists the other settings.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

CONFIG=${CONFIG:-configs/s2_7b_mixed.yaml}
SEQ_LENGTH=${SEQ_LENGTH:-32768}
MOCK_VOCAB_SIZE=32000
EXTRA_FLAGS=("$@")

MODEL=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --ffn-hidden-size 11008
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 500000
    --untie-embeddings-and-output-weights
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std 0.02
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 128
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
)
PARALLEL=(
    --tensor-model-parallel-size "${TP:-8}"
    --pipeline-model-parallel-size "${PP:-1}"
    --sequence-parallel
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

launch "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}"
