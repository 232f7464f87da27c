#!/usr/bin/env bash
# S2 in a Megatron launch that exists already: the script before and after, trained with the same flags.
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"

ITERATIONS=${ITERATIONS:-30}
train stock 1 examples/existing_launch/stock.py --train-iters "$ITERATIONS"

echo "with_s2.py is stock.py and four lines:"
diff examples/existing_launch/stock.py examples/existing_launch/with_s2.py || true
train stock_with_s2 1 examples/existing_launch/with_s2.py --s2-config examples/small.yaml --train-iters "$ITERATIONS"
echo "validation loss: $(validation_loss stock) dense, $(validation_loss stock_with_s2) with S2"
