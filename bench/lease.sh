#!/usr/bin/env bash
# A quarter of an hour on a GPU as one program, for a rented GPU host without a network.
#
#   bench/lease.sh --pack OUT          where there is a network: OUT/a and OUT/b, two uploads below 64 MiB
#   bench/lease.sh --unpack FOLDER     on the host, after each upload; run it in the project's folder
#   bench/lease.sh --plan              the stages, what each shows, and how long it may take
#   bench/lease.sh [--for SECONDS] [--out FOLDER]
#                                      runs the stages in the background and follows them; called again, it
#                                      goes on following, or starts what is not done yet
#   bench/lease.sh --rehearse          every stage on a CPU, with small shapes
#
# The host has x86-64, Python 3.12, PyTorch 2.11 or later for CUDA, its Triton and torchvision, transformers and pytest. Two
# engines of the 26B shape in bf16 side by side take 115 GB of GPU memory; in FP8 72. Where there is less, --only.
set -eu
cd "$(dirname "$0")/.."
BUNDLE=${LEASE_BUNDLE:-/tmp/bundle} SITE=${LEASE_SITE:-/tmp/site}

unpack() { # what came since the last time: an archive is there when all of its parts are
    mkdir -p "$BUNDLE" "$SITE"
    cp "$1"/* "$BUNDLE"/
    for parts in "$BUNDLE"/*.parts; do
        name=$(basename "$parts" .parts)
        [ -e "$SITE/.$name" ] && continue
        found=$(find "$BUNDLE" -name "$name.tar.xz.[0-9]" | wc -l)
        [ "$found" = "$(cat "$parts")" ] || { echo "$name: $found of $(cat "$parts") parts"; continue; }
        (cat "$BUNDLE/$name.tar.xz".[0-9] | tar xJ -C "$SITE" && touch "$SITE/.$name" && echo "$name: unpacked") &
    done
    wait
    python3 -m bench.lease.install "$SITE" # what pip would leave, so that vLLM finds the plugins
    python3 -m compileall -q -j 16 "$SITE" . >/dev/null 2>&1 || true # some files are of other Pythons
}

[ "${1:-}" = --unpack ] && { unpack "$2"; exit; }
python=python3
if [ -e "$SITE/.vllm" ]; then
    export PYTHONPATH="$PWD:$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages"
else
    [ -x .venv/bin/python ] && python=.venv/bin/python
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
fi
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
[ "${1:-}" = --pack ] && { shift; exec "$python" -m bench.lease.pack "$@"; }
exec "$python" -m bench.lease "$@"
