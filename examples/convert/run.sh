#!/usr/bin/env bash
# A model that others trained goes on sparse, beside dense: every step of docs/convert.md, on short sequences.
#
#   MODEL=smollm2             a Hugging Face folder, or a GGUF file
#   TEXT=corpus               a text, or a folder of texts (the pages of docs)
#   CONFIG=my.yaml            the plan (examples/convert/window_sink.yaml)
#   HEADS=16                  KV heads that stay dense
#   SEQ_LENGTH=512, SEQUENCES=2   of the text; so many are measured on
#   ITERATIONS=20, RUNS=/big/disk, PYTHON=python3.12   as in the other examples
source "$(dirname "${BASH_SOURCE[0]}")/../small.sh"

require MODEL "give a Hugging Face folder or a GGUF file; docs/convert.md names one"
for setting in HEADS=16 SEQ_LENGTH=512 SEQUENCES=2; do require_count "${setting%=*}" "${setting#*=}"; done
[[ -e $MODEL ]] || fail "MODEL=$MODEL; expected a folder or a .gguf that is there; correct the path"
TEXT=${TEXT:-} CONFIG=${CONFIG:-examples/convert/window_sink.yaml} HEADS=${HEADS:-16}
SEQ_LENGTH=${SEQ_LENGTH:-512} SEQUENCES=${SEQUENCES:-2} ITERATIONS=${ITERATIONS:-20}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # also where the package is not installed
FOLDER=$RUNS/convert
[[ ! -e $FOLDER ]] || fail "RUNS=$RUNS; $FOLDER is there already; expected none; move it away"
mkdir -p "$FOLDER"
texts=(docs/*.md)
if [[ -n $TEXT ]]; then texts=("$TEXT"); fi

if [[ -f $MODEL ]]; then
    echo "a GGUF file becomes a folder"
    "$PYTHON" examples/convert/from_gguf.py "$MODEL" "$FOLDER/hf"
    MODEL=$FOLDER/hf
fi
echo "import-hf: the folder becomes a Megatron checkpoint"
"$PYTHON" -m s2_megatron import-hf --input "$MODEL" --output "$FOLDER/megatron"
echo "make-dataset: text becomes tokens"
"$PYTHON" -m s2_megatron make-dataset --tokenizer "$MODEL" --output "$FOLDER/text" "${texts[@]}" | tee "$FOLDER/text.log"
split=$(sed -nE 's/.*--split ([0-9,]+).*/\1/p' "$FOLDER/text.log")
measured=$split
if [[ $split == 100,0,0 ]]; then measured=50,50,0; fi  # of a few texts none is for validation

echo "choose-dense: which KV heads stay dense"
"$PYTHON" -m s2_megatron choose-dense --load "$FOLDER/megatron" --s2-config "$CONFIG" --data-path "$FOLDER/text" \
    --split "$measured" --seq-length "$SEQ_LENGTH" --sequences "$SEQUENCES" --heads "$HEADS" \
    --write "$FOLDER/chosen.yaml"

evaluations=(--eval-iters 2)
if [[ $split == 100,0,0 ]]; then evaluations=(--eval-iters 0); fi
for name in dense sparse; do
    sparsity=()
    if [[ $name == sparse ]]; then sparsity=(--s2-config "$FOLDER/chosen.yaml"); fi
    echo "train.sh: the model goes on, $name"
    PYTHON=$PYTHON "$FOLDER/megatron/train.sh" --data-path "$FOLDER/text" --split "$split" "${sparsity[@]}" \
        --seq-length "$SEQ_LENGTH" --global-batch-size 2 --train-iters "$ITERATIONS" --lr-warmup-iters 0 \
        "${evaluations[@]}" --save "$FOLDER/$name" --s2-loss-log "$FOLDER/$name/losses.jsonl" 2>&1 |
        tee "$FOLDER/$name.log" | awk "$SHOWN" || train_failed "$name" "$FOLDER/$name.log"
done
echo "compare: the two runs"
"$PYTHON" -m s2_megatron compare "dense=$FOLDER/dense" "sparse=$FOLDER/sparse"
echo "export-hf: the sparse model becomes a folder"
"$PYTHON" -m s2_megatron export-hf --load "$FOLDER/sparse" --output "$FOLDER/sparse-hf"
echo "transformers generates with the small cache"
"$PYTHON" examples/convert/answer.py "$FOLDER/sparse-hf" "${QUESTION:-Why is the sky blue?}"
