#!/bin/sh
# The recipe of a small model that sees, from diffusiongemma-tiny: checkpoints/train_seeing.sh DIR
# DIR/seeing is the result. Repeated after a stop, it continues. About 45 minutes on one CPU core.
set -eu
out=$1
export OMP_NUM_THREADS=1
stage() { echo "== $1"; shift; "${PYTHON:-.venv/bin/python}" -m "$@"; }
mkdir -p "$out"
stage "1 of 4: the tower alone, with captions" \
    checkpoints.recipes.images.train_tower --init-from checkpoints/diffusiongemma-tiny \
    --out "$out/tower" --state "$out/tower.state"
stage "2 of 4: questions about pictures, and text" \
    checkpoints.recipes.images.train --init-from "$out/tower" \
    --out "$out/2" --state "$out/2.state"
stage "3 of 4: mostly counting and rows of digits" \
    checkpoints.recipes.images.train --init-from "$out/2" \
    --out "$out/3" --state "$out/3.state" --steps 400 --seed 1 --later
stage "4 of 4: the mean of the last two" \
    checkpoints.recipes.average "$out/2" "$out/3" --share 0.6 --out "$out/seeing"
