#!/usr/bin/env bash
# A GPT of 70 billion parameters: 80 layers, hidden 8192, 64 query heads in 8 groups. Eight nodes of 8 GPUs: tensor and
# sequence parallel inside a node, pipeline parallel over the nodes.
#
#   NNODES=8 NODE_RANK=$RANK_OF_THIS_NODE MASTER_ADDR=node0 \
#   DATA_PATH=/data/corpus_text_document TOKENIZER=/data/tokenizer examples/pretrain_70b.sh
#
# launch.sh lists the other settings.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

CONFIG=${CONFIG:-configs/s2_70b_mixed.yaml}
SEQ_LENGTH=${SEQ_LENGTH:-32768}
MOCK_VOCAB_SIZE=32000
EXTRA_FLAGS=("$@")

MODEL=(
    --num-layers 80
    --hidden-size 8192
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --ffn-hidden-size 28672
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
    --init-method-std 0.01
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 100000
    --lr 1.5e-4
    --min-lr 1.5e-5
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
    --pipeline-model-parallel-size "${PP:-8}"
    --sequence-parallel
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

launch "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}"
