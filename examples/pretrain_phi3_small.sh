#!/usr/bin/env bash
# The attention of Phi-3-small (configs/phi3_small.yaml) in a model of its size: 32 layers, hidden 4096, 32 query
# heads in 8 groups, LayerNorm, tied embeddings. The feed-forward part is a SwiGLU; Phi-3-small's own clipped GEGELU
# and its muP multipliers are no part of the preset, so its published weights do not load here. One node of 8 GPUs.
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER=/data/tokenizer examples/pretrain_phi3_small.sh
#
# launch.sh lists the other settings.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

CONFIG=${CONFIG:-configs/phi3_small.yaml}
SEQ_LENGTH=${SEQ_LENGTH:-8192}
MOCK_VOCAB_SIZE=100352
EXTRA_FLAGS=("$@")

MODEL=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --ffn-hidden-size 14336
    --swiglu
    --normalization LayerNorm
    --position-embedding-type rope
    --rotary-base 1000000
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
    --tensor-model-parallel-size "${TP:-4}"
    --pipeline-model-parallel-size "${PP:-1}"
    --sequence-parallel
)

launch "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}"
