#!/bin/sh
# The recipe of diffusiongemma-tiny, from random weights to the checkpoint: checkpoints/train.sh DIR
# An hour and a quarter on two CPU cores; DIR/4 is the result.
set -eu
out=$1
export OMP_NUM_THREADS=1
stage() { echo "== $1"; shift; "${PYTHON:-.venv/bin/python}" -m "$@"; }
stage "1 of 4: all tasks" \
    checkpoints.recipes.train --out "$out/1" --minutes 34
stage "2 of 4: look-back and matching heads" \
    checkpoints.recipes.match_heads "$out/1" "$out/2"
stage "3 of 4: dense look-ups" \
    checkpoints.recipes.train --init-from "$out/2" --out "$out/3" --minutes 12 --seed 31 \
    --lookups --keep-heads --muon-lr 3e-3 --adam-lr 2e-3
stage "4 of 4: all tasks again" \
    checkpoints.recipes.train --init-from "$out/3" --out "$out/4" --minutes 30 --seed 51 \
    --keep-heads --muon-lr 4e-3 --adam-lr 2e-3
