#!/usr/bin/env bash
# One sequence cut over context-parallel ranks: the same losses as in one process, while only those key blocks travel
# that the pattern reads. `sparse` is the default of --s2-cp-comm-type; the table has a column for what it sends.
#
#   CP=8 SEQ_LENGTH=131072 examples/long_context_cp.sh     on eight GPUs
source "$(dirname "${BASH_SOURCE[0]}")/small.sh"

require_count CP 2
require_count SEQ_LENGTH 2048
CP=${CP:-2} SEQ_LENGTH=${SEQ_LENGTH:-2048}
block=$(sed -n 's/^block_size: //p' examples/long_context.yaml)

# fits RANKS: each of them holds two pieces of the sequence, an early and a late one, of whole blocks.
fits() { (($1 == 1 || SEQ_LENGTH % (2 * $1 * block) == 0)); }
if ! fits "$CP"; then
    fitting=$(for ranks in {2..64}; do if fits "$ranks"; then printf '%s ' "$ranks"; fi; done)
    why="2 * CP pieces of whole blocks of $block tokens, as context parallelism cuts the sequence"
    [[ -n $fitting ]] || fail "SEQ_LENGTH=$SEQ_LENGTH; expected $why; use a multiple of $((2 * CP * block))"
    fail "CP=$CP; expected ranks that cut SEQ_LENGTH=$SEQ_LENGTH into $why; use one of: ${fitting% }"
fi
for ranks in 1 "$CP"; do
    train "long_context_cp$ranks" "$ranks" pretrain_gpt_s2.py --s2-config examples/long_context.yaml \
        --context-parallel-size "$ranks" --seq-length "$SEQ_LENGTH" --micro-batch-size 1 --global-batch-size 1 \
        --train-iters "${ITERATIONS:-10}" --eval-iters 1
done
echo "validation loss: $(validation_loss long_context_cp1) on one rank, $(validation_loss "long_context_cp$CP") on $CP"
