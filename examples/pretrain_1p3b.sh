#!/usr/bin/env bash
# A GPT of 1.3 billion parameters: 24 layers, hidden 2048, 16 heads. One node of 8 GPUs, data parallel.
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER=/data/tokenizer examples/pretrain_1p3b.sh
#   CONFIG=configs/s2_1p3b_dense.yaml MOCK_DATA=1 examples/pretrain_1p3b.sh --train-iters 50 --lr-warmup-iters 5
#
# 128K tokens on one GPU of 141 GB, with the memory flags of the row in docs/performance.md:
#
#   PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True GPUS_PER_NODE=1 SEQ_LENGTH=131072 \
#       CONFIG=configs/s2_1p3b_s2.yaml MOCK_DATA=1 examples/pretrain_1p3b.sh \
#       --global-batch-size 1 --train-iters 10 --lr-warmup-iters 1 --s2-keep-attention-output \
#       --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
#       --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
#
# launch.sh lists the other settings.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

CONFIG=${CONFIG:-configs/s2_1p3b_mixed.yaml}
SEQ_LENGTH=${SEQ_LENGTH:-8192}
MOCK_VOCAB_SIZE=32000
EXTRA_FLAGS=("$@")

MODEL=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --ffn-hidden-size 5632
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 10000
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
    --tensor-model-parallel-size "${TP:-1}"
    --pipeline-model-parallel-size "${PP:-1}"
)

launch "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}"
