#!/bin/sh
# The recipe of qwen3-tiny-target and qwen3-tiny-dflash, from random weights to both:
#     checkpoints/train_drafter.sh DIR
# About an hour on one CPU core; DIR/target and DIR/dflash are the result.
set -eu
out=$1
here=$(dirname "$0")
export OMP_NUM_THREADS=1
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
echo "== 1 of 4: the target"
"$python" -m checkpoints.recipes.train_target --out "$out/target" --minutes 27 --seed 0
echo "== 2 of 4: prompts for it to answer"
"$python" -m checkpoints.recipes.drafter.prompts --count 6000 --seed 0 > "$out/prompts.jsonl"
echo "== 3 of 4: the drafter"
"$python" -m vllm_dllm drafter train --target "$out/target" --prompts "$out/prompts.jsonl" \
    -o "$out/dflash" --mask-token '<unused0>' --layers 3 --target-layers 1,3,5 --minutes 18 --seed 0
echo "== 4 of 4: exact match of the one, τ of the other"
"$python" -m checkpoints.recipes.drafter.evaluate "$out/target" "$out/dflash" "$here/held_out.jsonl" \
    --draft-widths 15,13,11,9,7,5,3,1 | tee "$out/evaluation.txt"
tail -n 1 "$out/evaluation.txt" > "$out/dflash/evaluation.json"
