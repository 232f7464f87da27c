#!/usr/bin/env bash
# The 7B model of pretrain_7b.sh on sequences of 131072 tokens. One node of 8 GPUs, all context parallel: every GPU
# holds 16384 tokens of a sequence and receives the key blocks that its pattern attends. Under full recompute, attention
# is not computed a second time.
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER=/data/tokenizer examples/pretrain_7b_128k.sh
#   TP=2 CP=4 MOCK_DATA=1 examples/pretrain_7b_128k.sh --train-iters 50 --lr-warmup-iters 5
#
# Memory of a GPU, counted, not measured: weights, gradients and an eighth of the optimizer's state 47 GiB, layer inputs
# 4, stored attention outputs 4, one layer and the loss about 8: it needs 80 GB and the distributed optimizer
# (Transformer Engine, or Apex). TP=2 CP=4, with sequence parallel, takes 19 GiB less. A mixed CONFIG trains too; its
# dense layers then send all keys and values.
# launch.sh lists the other settings.
set -euo pipefail

CONFIG=${CONFIG:-configs/s2_7b_s2.yaml}
SEQ_LENGTH=${SEQ_LENGTH:-131072}
TP=${TP:-1}
OUTPUT=${OUTPUT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/runs/$(basename "$CONFIG" .yaml)_128k}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# As many tokens a step as pretrain_7b.sh.
set -- \
    --context-parallel-size "${CP:-8}" \
    --s2-cp-comm-type sparse \
    --s2-keep-attention-output \
    --global-batch-size 32 \
    "$@"
source "$(dirname "${BASH_SOURCE[0]}")/pretrain_7b.sh"
