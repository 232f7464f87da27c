#!/usr/bin/env bash
# A dense model of one length goes on at four times its length, as S2 and, for comparison, as the dense model that it was.
# RoPE has to be told of the new length, with one of Megatron's flags:
#
#   --rotary-base 500000                            every position turns slower; for any length
#   --use-rope-scaling --rope-scaling-factor 4      Llama 3's scaling, for models that were trained at 8,192 tokens:
#                                                   Megatron has this length fixed
#   --rotary-seq-len-interpolation-factor 4         positions divided by 4; export-hf has no form for it
#
# Whatever it is, every later command on the longer model needs it again, as it needs --seq-length.
source "$(dirname "${BASH_SOURCE[0]}")/small.sh"

ITERATIONS=${ITERATIONS:-60}
train short 1 pretrain_gpt_s2.py --train-iters "$ITERATIONS" --save "$RUNS/short/checkpoints"

# The base that turns a head dim of 16 over 1024 tokens as far as 10000 does over 256: 10000 * 4^(16 / 14).
LONGER=(--seq-length 1024 --micro-batch-size 1 --global-batch-size 1 --rotary-base 48761
        --load "$RUNS/short/checkpoints" --finetune --train-iters "$ITERATIONS")
train long_dense 1 pretrain_gpt_s2.py "${LONGER[@]}"
train long_s2 1 pretrain_gpt_s2.py --s2-config examples/small.yaml "${LONGER[@]}" --save "$RUNS/long_s2/checkpoints"

echo "validation loss: $(validation_loss short) at 256 tokens; after $ITERATIONS iterations at 1024" \
    "$(validation_loss long_dense) as dense, $(validation_loss long_s2) as S2"
