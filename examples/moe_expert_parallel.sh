#!/usr/bin/env bash
# A mixture of experts with S2 attention: four experts in every layer, two of them on each rank. Attention is the same on
# all ranks of an expert-parallel group, which share the batch as data-parallel ranks do.
source "$(dirname "${BASH_SOURCE[0]}")/small.sh"

train moe 2 pretrain_gpt_s2.py --s2-config examples/small.yaml --expert-model-parallel-size 2 \
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --micro-batch-size 2 \
    --train-iters "${ITERATIONS:-30}"
