#!/bin/sh
# The recipe of sdar-tiny, from qwen3-tiny-target: checkpoints/train_masked.sh DIR
# An hour on one CPU core; DIR/3 is the result.
set -eu
out=$1
here=$(dirname "$0")
export OMP_NUM_THREADS=1
train() { "${PYTHON:-.venv/bin/python}" -m checkpoints.recipes.train_masked "$@"; }
echo "== 1 of 3: all tasks"
train --init-from "$here/qwen3-tiny-target" --out "$out/1" --steps 2000 --seed 0
echo "== 2 of 3: mostly sums"
train --init-from "$out/1" --out "$out/2" --steps 1200 --seed 1 --later sums
echo "== 3 of 3: mostly sorting and JSON"
train --init-from "$out/2" --out "$out/3" --steps 600 --seed 2 --later forms
