#!/bin/sh
# Makes the FP8 and NVFP4 copies of diffusiongemma-tiny, and the prompts the latter is calibrated
# with: checkpoints/quantize.sh DIR
# A few minutes on two CPU cores, nearly all of it calibration.
set -eu
out=$1
python=${PYTHON:-.venv/bin/python}
here=$(dirname "$0")
export OMP_NUM_THREADS=1
mkdir -p "$out"
"$python" -m checkpoints.recipes.tasks --calibration > "$out/calibration.jsonl"
quantize() { "$python" -m vllm_dllm quantize "$here/diffusiongemma-tiny" "$@"; }
quantize --scheme fp8-dynamic -o "$out/diffusiongemma-tiny-FP8-dynamic"
quantize --scheme nvfp4 --calibration "$out/calibration.jsonl" -o "$out/diffusiongemma-tiny-NVFP4"
"$python" -m checkpoints.recipes.modelopt "$out/diffusiongemma-tiny-NVFP4" "$out/diffusiongemma-tiny-ModelOpt-NVFP4"
