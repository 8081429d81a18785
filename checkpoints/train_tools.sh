#!/bin/sh
# The recipe of a small model that calls functions, from diffusiongemma-tiny:
#     checkpoints/train_tools.sh DIR
# 40 minutes on one CPU core; DIR/2 is the result.
set -eu
out=$1
here=$(dirname "$0")
export OMP_NUM_THREADS=1
train() { "${PYTHON:-.venv/bin/python}" -m vllm_dllm.tools.pretrain.train --keep-heads --processes 1 "$@"; }
echo "== 1 of 2: mostly calls"
train --init-from "$here/diffusiongemma-tiny" --out "$out/1" --minutes 15 --seed 71 --calls first \
    --muon-lr 3e-3 --adam-lr 2e-3
echo "== 2 of 2: mostly what it knew, and calls"
train --init-from "$out/1" --out "$out/2" --minutes 25 --seed 72 --calls later \
    --muon-lr 3e-3 --adam-lr 1.5e-3
