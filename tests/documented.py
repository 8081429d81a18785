"""How each command and program of the documentation is tested.

A command that is not in this table fails `tests/unit/docs`, unless the text says that it needs a
GPU or a network. `tests/server/test_documented.py` runs the others.
"""

import tomllib

from tests.paths import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
WHEEL = f"vllm_dllm-{VERSION}-py3-none-any.whl"
TINY = "checkpoints/diffusiongemma-tiny"

TOOLS = {
    f".venv/bin/vllm-dllm plan {TINY} --gpu h200 --context 1024": None,
    f".venv/bin/vllm-dllm quantize {TINY} --scheme fp8-dynamic -o /tmp/tiny-FP8": "tiny-FP8",
    f".venv/bin/vllm-dllm quantize {TINY} --scheme int8 -o /tmp/tiny-int8": "tiny-int8",
    f".venv/bin/vllm-dllm quantize {TINY} --scheme w4a16 -o /tmp/tiny-W4A16": "tiny-W4A16",
    f".venv/bin/vllm-dllm quantize {TINY} --scheme nvfp4 --dry-run": None,
    ".venv/bin/vllm-dllm quantize checkpoints/sdar-tiny --scheme fp8-dynamic"
    " -o /tmp/sdar-FP8": "sdar-FP8",
    f".venv/bin/vllm-dllm quantize {TINY} --scheme nvfp4"
    " --calibration checkpoints/calibration.jsonl -o /tmp/tiny-NVFP4": "tiny-NVFP4",
    ".venv/bin/vllm-dllm drafter train --target checkpoints/qwen3-tiny-target"
    " --prompts checkpoints/calibration.jsonl --mask-token '<unused0>' --steps 20"
    " -o /tmp/drafter": "drafter",
    ".venv/bin/vllm-dllm drafter calibrate-width --target checkpoints/qwen3-tiny-target"
    " --drafter checkpoints/qwen3-tiny-dflash --prompts checkpoints/calibration.jsonl"
    " -o /tmp/predictor": "predictor",
}
"""Run with fewer prompts -> the file or folder that they write below /tmp."""

_SMALL = "--dtype float32 --max-model-len 1024 --kv-cache-memory-bytes 1G"
SERVERS = (
    f".venv/bin/vllm serve {TINY} --host 127.0.0.1 {_SMALL}",
    f".venv/bin/vllm serve checkpoints/sdar-tiny --host 127.0.0.1 {_SMALL}",
    f".venv/bin/vllm serve {TINY}-vision --host 127.0.0.1 {_SMALL}",
    f".venv/bin/vllm serve {TINY}-tools --host 127.0.0.1 {_SMALL}"
    " --enable-auto-tool-choice --tool-call-parser gemma4_strict",
    f".venv/bin/vllm serve {TINY} --host 127.0.0.1 {_SMALL} --additional-config"
    """ '{"vllm_dllm": {"window_rule": "symmetric", "defaults": {"diffusion_max_steps": 24}}}'""",
    f".venv/bin/vllm serve {TINY} --host 127.0.0.1 {_SMALL} --additional-config"
    """ '{"vllm_dllm": {"defaults": {"diffusion_acceptance": "confidence"}}}'""",
    f".venv/bin/vllm serve {TINY} --host 127.0.0.1 {_SMALL} --additional-config"
    """ '{"vllm_dllm": {"limits": {"n": 8, "canvases": 4}}}'""",
    f".venv/bin/vllm serve {TINY} --host 127.0.0.1 {_SMALL} --additional-config"
    """ '{"vllm_dllm": {"load_stages": [{"canvases": 16, "stability_threshold": 0},"""
    """ {"canvases": 32, "stability_threshold": 0, "confidence_threshold": 0.01}]}}'""",
    f".venv/bin/vllm serve {TINY}-FP8-dynamic --host 127.0.0.1 --max-model-len 1024"
    " --kv-cache-memory-bytes 1G",
    f".venv/bin/vllm serve {TINY}-ModelOpt-NVFP4 --host 127.0.0.1 --max-model-len 1024"
    " --kv-cache-memory-bytes 1G",
    ".venv/bin/vllm serve checkpoints/qwen3-tiny-target --host 127.0.0.1 --dtype float32"
    " --kv-cache-memory-bytes 1G --speculative-config"
    """ '{"method": "dflash", "model": "checkpoints/qwen3-tiny-dflash","""
    """ "num_speculative_tokens": 15}'"""
    """ --additional-config '{"vllm_dllm": {"drafter": {"width_policy": "acceptance"}}}'""",
)
"""Their engines answer, in the test's process and not compiled."""

MAKE = {
    "make serve": f".venv/bin/vllm serve {TINY} --host 127.0.0.1 --port 8000"
    f""" --diffusion-config '{{"canvas_length": 64}}' {_SMALL}""",
    "make demo": ".venv/bin/vllm-dllm demo",
    "make wheel": ".venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation"
    " --wheel-dir dist .",
    "make bench": ".venv/bin/python -m bench.serving",
}
"""What each runs last; `SERVERS` or `ELSEWHERE` says how that is tested."""
SERVERS = (*SERVERS, MAKE["make serve"])

CLIENTS = (
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d"
    f""" '{{ "model": "{TINY}", "messages": [{{"role": "user", "content": "Sort: q d x a"}}],"""
    """ "seed": 1 }'""",
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d"
    f""" '{{ "model": "{TINY}", "messages": [{{"role": "user", "content": "Sort: q d x a"}}],"""
    """ "seed": 1, "vllm_xargs": {"diffusion_max_steps": 16} }'""",
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d"
    f""" '{{ "model": "{TINY}", "messages": [{{"role": "user", "content": "Sort: q d x a"}}],"""
    """ "max_tokens": 20, "structured_outputs": {"regex": "[a-z]( [a-z]){3}"} }'""",
)
"""Sent to a server; the answer to each is right."""

_WHEEL = "tests/server/test_wheel.py::test_demo_serves_the_checkpoint_of_the_wheel"
_TUNE = "tests/server/test_tune.py::test_found_settings_are_served"
_CANVASES = "tests/server/test_canvases.py::test_the_documented_request"
ELSEWHERE = {
    "curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d"
    f""" '{{ "model": "{TINY}", "messages": [{{"role": "user", "content": "Sort: q d x a"}}],"""
    """ "seed": 1, "stream": true, "vllm_xargs": {"diffusion_stream_canvases": true} }'""": (
        _CANVASES
    ),
    ".venv/bin/vllm-dllm top --url http://127.0.0.1:8000": "tests/server/test_metrics.py::test_top",
    ".venv/bin/vllm-dllm demo": _WHEEL,
    '.venv/bin/vllm-dllm demo --ask "Sort: q d x"': _WHEEL,
    ".venv/bin/vllm-dllm demo checkpoints/sdar-tiny": _WHEEL,
    ".venv/bin/vllm-dllm demo checkpoints/diffusiongemma-tiny-vision": _WHEEL,
    ".venv/bin/vllm-dllm demo --save-picture canvas.svg": _WHEEL,
    f".venv/bin/vllm-dllm eval {TINY} {TINY}-FP8-dynamic {TINY}-NVFP4": (
        "tests/server/test_eval.py::test_quantised_checkpoints"
    ),
    f".venv/bin/vllm-dllm tune {TINY} --task checkpoints/held_out.yaml": _TUNE,
    f".venv/bin/vllm serve {TINY} --host 127.0.0.1 --config tuning/defaults.yaml {_SMALL}": _TUNE,
    MAKE["make bench"]: "tests/server/test_documented.py::test_bench_starts",
    MAKE["make wheel"]: _WHEEL,
    "python3 -m venv venv": _WHEEL,
    "python3 -m venv .venv": _WHEEL,
    "venv/bin/vllm-dllm demo": _WHEEL,
    f'venv/bin/vllm serve "$(venv/bin/vllm-dllm checkpoint)" --host 127.0.0.1 {_SMALL}': _WHEEL,
}
"""Command -> the test that does the same with other settings."""

PROGRAMS = {
    "from pydantic import BaseModel": (
        "tests/server/test_structured_outputs.py::test_documented_program"
    ),
    "import math": "tests/server/test_documented.py::test_decision_program",
    "import base64": "tests/server/test_images.py::test_documented_programs",
    "from openai import OpenAI": "tests/server/test_documented.py::test_client_program",
    "from vllm import LLM, SamplingParams": "tests/server/test_documented.py::test_offline_program",
}
"""First line of a program -> the test that runs it."""
