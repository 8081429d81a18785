"""The sub-commands of `vllm-dllm`: what each does, its arguments, and the function that gets them.

The function is named by a string, since its module takes seconds to load. It gets each argument by
its name on the command line, or by its `dest`.
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from vllm_dllm.tools.plan import GPUS

Argument = tuple[tuple[str, ...], dict[str, Any]]  # what argparse's add_argument takes


class Command:
    """One sub-command, as the command line describes it."""

    def __init__(
        self, work: str, text: str, *arguments: Argument, more: str = "", resumes: bool = False
    ) -> None:
        """`work` is the function that does it, as "module:function". `text` says what it does, for
        the help, and `more` is a further sentence for the sub-command's own help. If `resumes`, a
        stopped run continues when the command is repeated."""
        self.work = work
        self.text = text
        self.arguments = arguments
        self.more = more
        self.resumes = resumes


def _arg(flags: str, text: str, kind: Any = str, default: Any = None, **options: Any) -> Argument:
    """Returns an argument. `flags` are such as "-o --out! FOLDER", where `!` makes it required and
    FOLDER is the name of its value in the help. The default is appended to `text`."""
    words = flags.split()
    names = [word.rstrip("!") for word in words if word[0] == "-" or word == words[0]]
    if len(names) < len(words):
        options["metavar"] = words[-1]
    if "!" in flags:
        options["required"] = True
    if default is not None:
        options["default"] = default
        text += " (default: %(default)s)"
    return (*names,), {"type": kind, "help": text, **options}


def _flag(name: str, text: str) -> Argument:
    """Returns an option that has no value and is False if it is left out."""
    return (name,), {"action": "store_true", "help": text}


def _parse_image_limit(text: str) -> int | None:
    """Returns the most images of a prompt by vLLM's `--limit-mm-per-prompt`; None if that sets no
    limit, or allows videos, which need the same tower. Raises ArgumentTypeError for other text."""
    try:
        limits = json.loads(text)
        images = limits.get("image")
    except (ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(
            f'expected JSON like {{"image": 0}}, got {text}'
        ) from error
    if images is not None and (type(images) is not int or images < 0):
        raise argparse.ArgumentTypeError(f"image must be a number from 0 on, got {images!r}")
    return None if limits.get("video") else images


def _split_words(text: str) -> list[str]:
    """Returns a shell's words. Raises ArgumentTypeError if a quotation has no end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text}: expected a shell's words") from error


def _parse_layer_ids(text: str) -> tuple[int, ...]:
    """Returns the numbers of layers such as 1,3,5. Raises ArgumentTypeError for other text."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,3,5, got {text}") from error


def _parse_seed(text: str) -> int:
    """Returns a seed that random, NumPy and PyTorch take. Raises ArgumentTypeError for another."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 0 on, of at most 18 digits, got {text}"
        )
    return int(text)


_ROW = '{"messages": [...]} or {"prompt": "text"}'
_TASK = "task of lm-evaluation-harness, such as gsm8k, or a task file"
_CHECKPOINT = _arg("checkpoint", "folder of the checkpoint", Path)
_OUT = _arg("-o --out!", "folder to write; must not exist", Path)
_SEED = _arg("--seed", "of random numbers", _parse_seed, 0)
_MAX_TOKENS = _arg("--max-tokens", "longest answer", int, 256)

_OF_TASKS = (
    _arg(
        "--data FOLDER",
        "folder of the tasks' data sets, each in OWNER/NAME. For task files, their own folder is "
        "searched first; for tasks given by name, also Hugging Face's cache. Nothing is downloaded",
        Path,
        Path("."),
    ),
    _arg(
        "--api",
        "whether prompts go through the chat template",
        str,
        "chat",
        choices=("chat", "completions"),
    ),
    _arg("--limit N", "first N prompts of each task only", int),
    _arg("--concurrency N", "prompts at once", int, 32),
    _arg(
        "--serve-options OPTIONS",
        "for `vllm serve`, as one string: --serve-options='--dtype float32' (default: none; "
        "without a GPU --kv-cache-memory-bytes 1G and a --max-model-len that fits the tasks)",
        _split_words,
    ),
)

GROUPS = {"drafter": "Make block-diffusion drafters for speculative decoding."}
"""First word of commands of two words -> what these commands do, for the help."""

COMMANDS = {
    "demo": Command(
        "vllm_dllm.tools.demo:run",
        "Start a server, ask a few questions, show the canvas denoising, stop the server.",
        _arg(
            "checkpoint",
            "folder of the checkpoint to serve (default: the small one of this package)",
            Path,
            nargs="?",
        ),
        _arg(
            "--ask QUESTION",
            "ask this instead of the built-in questions; may be given several times",
            action="append",
        ),
        _arg("--port", "port of the server (default: a free one)", int),
        _arg("--pace SECONDS", "least time a step stays on the terminal, 0 to 5", float, 0.12),
        _arg(
            "--save-picture FILE.svg",
            "also draw the first answer as an SVG file, one row per step",
            Path,
            dest="picture",
        ),
    ),
    "top": Command(
        "vllm_dllm.tools.top:run",
        "Watch a running server in the terminal: requests, steps per block, tokens per second.",
        _arg("--url", "address of the server", str, "http://127.0.0.1:8000"),
        _flag("--once", "print one frame as plain text and end"),
        more="q or Ctrl-C ends it.",
    ),
    "checkpoint": Command(
        "vllm_dllm.checkpoints:print_folder",
        "Print the folder of the small checkpoint of this package, for `vllm serve`.",
    ),
    "quantize": Command(
        "vllm_dllm.tools.quantize.quantize:quantize",
        "Write a quantised copy of a checkpoint that `vllm serve` loads.",
        _arg("checkpoint", "folder of the unquantised checkpoint", Path),
        _arg(
            "--scheme!",
            "fp8-dynamic, int8: half the size; nvfp4, w4a16: less than a third. nvfp4 needs "
            "--calibration, and is for DiffusionGemma only",
            choices=("fp8-dynamic", "int8", "nvfp4", "w4a16"),
        ),
        _arg("-o --out", "folder to write; must not exist", Path),
        _arg(
            "--calibration PROMPTS.jsonl", f"nvfp4: prompts to denoise, one {_ROW} per line", Path
        ),
        _flag(
            "--dry-run",
            "print which layers are quantised and which are left, with sizes; write nothing",
        ),
        resumes=True,
    ),
    "drafter train": Command(
        "vllm_dllm.tools.drafter.train:train",
        "Train a DFlash drafter for your model, ready for `vllm serve`. After an interruption the "
        "same command continues.",
        _arg("--target! MODEL", "folder of the model to draft for", Path),
        _OUT,
        _arg("--prompts FILE.jsonl", f"to answer, one {_ROW} per line", Path),
        _arg("--server URL", "vLLM server of the target, to answer the prompts"),
        _arg(
            "--from-buffer DIR",
            "instead of prompts: blocks that the drafter --init-from recorded while it served",
            Path,
        ),
        _arg("--init-from DRAFTER", "drafter to continue from; its layout is kept", Path),
        _arg("--block-size", "anchor and drafted tokens", int, 16),
        _arg("--layers", "of the drafter", int, 3, dest="num_layers"),
        _arg(
            "--target-layers I,J,…",
            "target layers whose outputs are the context, from 0 (default: spread evenly)",
            _parse_layer_ids,
            dest="target_layer_ids",
        ),
        _arg("--mask-token TOKEN", "default: that of the target's tokenizer"),
        _arg("--minutes", "length of the training, or --steps", float),
        _arg("--steps", "length of the training, or --minutes", int),
        _SEED,
        _MAX_TOKENS,
        _arg("--device", "default: cuda where there is a GPU, else cpu"),
        resumes=True,
    ),
    "drafter calibrate-width": Command(
        "vllm_dllm.tools.drafter.calibrate:calibrate_width",
        "Measure which block size suits each prompt, and train the predictor of the width policy "
        "`blockpilot` on it.",
        _arg("--target! MODEL", "folder", Path),
        _arg("--drafter! MODEL", "folder", Path),
        _arg("--prompts! FILE.jsonl", f"one {_ROW} per line; a quarter is held out", Path),
        _OUT,
        _arg(
            "--variant",
            "full: the paper's, as wide as the vocabulary; small: 18 numbers",
            str,
            "small",
            choices=("full", "small"),
        ),
        _arg("--radius K", "try the drafter's own block size and the K below it", int, 2),
        _MAX_TOKENS,
        _SEED,
        _arg("--device", "cpu or cuda", str, "cpu"),
        resumes=True,
    ),
    "eval": Command(
        "vllm_dllm.tools.evaluate:run",
        "Serve checkpoints one after the other; compare accuracy, speed and size.",
        _arg(
            "checkpoints",
            "folder of a checkpoint; recovery is relative to the first one",
            Path,
            nargs="+",
        ),
        _arg(
            "--task NAME|FILE.yaml",
            f"{_TASK}; may be given several times (default: checkpoints/held_out.yaml)",
            action="append",
            dest="tasks",
        ),
        *_OF_TASKS,
        _arg(
            "-o --out FOLDER", "where eval.json and eval.png are written", Path, Path("evaluation")
        ),
    ),
    "tune": Command(
        "vllm_dllm.tools.tune:run",
        "Search for settings that answer a task sooner and as well; write them for `vllm serve`.",
        _CHECKPOINT,
        _arg(
            "--task! NAME|FILE.yaml",
            f"{_TASK}. Half of its prompts are searched with, half judge what was found",
        ),
        *_OF_TASKS,
        _arg("--trials N", "settings to try, the checkpoint's own first", int, 50),
        _arg(
            "--max-loss POINTS",
            "of accuracy, in percentage points, that speed may cost",
            float,
            0.5,
        ),
        _arg(
            "-o --out FOLDER",
            "where defaults.yaml, tune.json and tune.png are written; must not exist. A "
            "stopped run continues when the command is repeated",
            Path,
            Path("tuning"),
        ),
        resumes=True,
    ),
    "plan": Command(
        "vllm_dllm.tools.plan.capacity:print_plan",
        "Say how many requests of a checkpoint a GPU has room for. Needs no GPU.",
        _CHECKPOINT,
        _arg("--gpu!", "its kind", choices=tuple(GPUS)),
        _arg("--memory-gib GIB", "of each GPU (default: its data sheet's)", float),
        _arg("--context TOKENS", "prompt and answer of a request", int, 8192),
        _arg("--tensor-parallel-size N", "GPUs that share the model", int, 1, dest="ranks"),
        _arg("--kv-cache-dtype", "of keys and values", str, "auto", choices=("auto", "fp8")),
        _arg(
            "--limit-mm-per-prompt JSON",
            """'{"image": 0}' leaves the vision tower out, as it does in vllm serve""",
            _parse_image_limit,
            dest="most_images",
        ),
    ),
}
