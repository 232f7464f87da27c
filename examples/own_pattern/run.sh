#!/usr/bin/env bash
# A pattern of one's own: layer 1 reads a block mask from a file, layers 2 and 3 ask a Python function.
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"

mkdir -p "$RUNS"
"$PYTHON" examples/own_pattern/make_mask.py "$RUNS/first_block.npz" --blocks 16    # 256 tokens in blocks of 16
cat > "$RUNS/own_pattern.yaml" << 'YAML'
block_size: 16
layers: DMFF
specs:
  M: {mask: first_block.npz}     # relative to this file
  F: {function: "examples.own_pattern.patterns:powers_of_two"}
YAML

echo "What they look like: $RUNS/own_pattern.png"
"$PYTHON" -m s2_megatron inspect "$RUNS/own_pattern.yaml" --s2-allow-python-patterns --num-layers 4 \
    --num-attention-heads 4 --num-query-groups 2 --seq-length 256 --blocks 16 --layers 1 2 --png "$RUNS/own_pattern.png"

train own_pattern 1 pretrain_gpt_s2.py --s2-config "$RUNS/own_pattern.yaml" --s2-allow-python-patterns \
    --train-iters "${ITERATIONS:-30}"
