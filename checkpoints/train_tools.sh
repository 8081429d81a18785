#!/bin/sh
# The recipe of a small model that calls functions, from diffusiongemma-tiny:
#     checkpoints/train_tools.sh DIR
# An hour on one CPU core; DIR/tools is the result.
set -eu
out=$1
here=$(dirname "$0")
export OMP_NUM_THREADS=1
train() { "${PYTHON:-.venv/bin/python}" -m checkpoints.recipes.train --keep-heads --processes 1 "$@"; }
echo "== 1 of 4: mostly calls"
train --init-from "$here/diffusiongemma-tiny" --out "$out/1" --minutes 15 --seed 71 --calls first \
    --muon-lr 3e-3 --adam-lr 2e-3
echo "== 2 of 4: mostly what it knew, and calls"
train --init-from "$out/1" --out "$out/2" --minutes 25 --seed 72 --calls later \
    --muon-lr 3e-3 --adam-lr 1.5e-3
echo "== 3 of 4: mostly sorting, what it knew, and calls"
train --init-from "$out/2" --out "$out/3" --minutes 7 --seed 74 --calls last \
    --muon-lr 2e-3 --adam-lr 1e-3
echo "== 4 of 4: the mean of the last two"
"${PYTHON:-.venv/bin/python}" -m checkpoints.recipes.average "$out/2" "$out/3" --share 0.6 --out "$out/tools"
