#!/usr/bin/env bash
# A dense run and an S2 run that differ in nothing else, and the page that compares them.
source "$(dirname "${BASH_SOURCE[0]}")/small.sh"

ITERATIONS=${ITERATIONS:-60}
for name in dense s2; do
    sparsity=()
    if [[ $name == s2 ]]; then sparsity=(--s2-config examples/small.yaml); fi
    train "$name" 1 pretrain_gpt_s2.py "${sparsity[@]}" --train-iters "$ITERATIONS" \
        --s2-position-loss 8 --s2-loss-log "$RUNS/$name/losses.jsonl"
done
"$PYTHON" -m s2_megatron compare "dense=$RUNS/dense" "s2=$RUNS/s2" --html "$RUNS/compare.html"
