#!/usr/bin/env bash
# A dense checkpoint goes on as an S2 model. --finetune loads the weights alone; without it Megatron would resume the
# run, and another sparsity is refused then.
source "$(dirname "${BASH_SOURCE[0]}")/small.sh"

ITERATIONS=${ITERATIONS:-60} CONFIG=examples/small.yaml
require_count CHOOSE 2
train dense 1 pretrain_gpt_s2.py --train-iters "$ITERATIONS" --save "$RUNS/dense/checkpoints"

# CHOOSE=2: two more KV heads stay dense, those without which these weights lose most.
if [[ -n ${CHOOSE:-} ]]; then
    CONFIG=$RUNS/chosen.yaml
    rm -f "$CONFIG" "$RUNS/chosen.json"
    "$PYTHON" -m s2_megatron choose-dense --load "$RUNS/dense/checkpoints" --s2-config examples/small.yaml \
        --data-path "$RUNS/corpus/text" --heads "$CHOOSE" --write "$CONFIG"
fi

# The same weights under S2 attention, before any step of training.
train switched 1 pretrain_gpt_s2.py --s2-config "$CONFIG" --load "$RUNS/dense/checkpoints" --finetune \
    --train-iters "$ITERATIONS" --skip-train

# And after some. The learning rate warms up again, because the optimizer starts anew.
train dense_to_s2 1 pretrain_gpt_s2.py --s2-config "$CONFIG" --load "$RUNS/dense/checkpoints" --finetune \
    --train-iters "$ITERATIONS" --save "$RUNS/dense_to_s2/checkpoints"

echo "validation loss: dense $(validation_loss dense), the same weights as S2 $(validation_loss switched)," \
    "after $ITERATIONS more iterations $(validation_loss dense_to_s2)"
