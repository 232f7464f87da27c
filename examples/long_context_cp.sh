#!/usr/bin/env bash
# One sequence cut over context-parallel ranks: the same losses as in one process, while only those key blocks travel
# that the pattern reads. `sparse` is the default of --s2-cp-comm-type; the table has a column for what it sends.
#
#   CP=8 SEQ_LENGTH=131072 examples/long_context_cp.sh     on eight GPUs
source "$(dirname "${BASH_SOURCE[0]}")/small.sh"

require_count CP 2
require_count SEQ_LENGTH 2048
CP=${CP:-2}
for ranks in 1 "$CP"; do
    train "long_context_cp$ranks" "$ranks" pretrain_gpt_s2.py --s2-config examples/long_context.yaml \
        --context-parallel-size "$ranks" --seq-length "${SEQ_LENGTH:-2048}" --micro-batch-size 1 --global-batch-size 1 \
        --train-iters "${ITERATIONS:-10}" --eval-iters 1
done
echo "validation loss: $(validation_loss long_context_cp1) on one rank, $(validation_loss "long_context_cp$CP") on $CP"
