"""The command `vllm-dllm`: reads the command line and calls the module that does the work."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_dllm.checkpoints import SHIPPED_CHECKPOINT
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter.calibration.cli import add_calibrate_width
from vllm_dllm.tools.drafter.training.cli import add_train
from vllm_dllm.tools.plan.gpus import ELEMENT_BYTES, GPUS
from vllm_dllm.tools.resumable import exit_status
from vllm_dllm.tools.task_options import add_task_options, say_what_is_missing
from vllm_dllm.tools.tune.cli import add_tune


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command; returns the exit status."""
    options = _parser().parse_args(argv)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-dllm", description="Tools for serving diffusion language models with vLLM."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_top(commands)
    _add_checkpoint(commands)
    _add_quantize(commands)
    _add_drafter(commands)
    _add_eval(commands)
    add_tune(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Start a server, ask a few questions, show the canvas denoising, stop the server."
    parser = commands.add_parser("demo", help=text, description=text)
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        default=SHIPPED_CHECKPOINT,
        help="folder of the checkpoint to serve (default: the small one of this package)",
    )
    parser.add_argument(
        "--ask",
        action="append",
        metavar="QUESTION",
        help="ask this instead of the built-in questions; may be given several times",
    )
    parser.add_argument("--port", type=int, help="port of the server (default: a free one)")
    parser.add_argument(
        "--pace",
        type=float,
        default=0.12,
        metavar="SECONDS",
        help="least time a step stays on the terminal, 0 to 5 (default: %(default)s)",
    )
    parser.add_argument(
        "--save-picture",
        type=Path,
        metavar="FILE.svg",
        help="also draw the first answer as an SVG file, one row per step",
    )
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from vllm_dllm.tools import demo  # late: it loads more than the other commands need
    from vllm_dllm.tools.server_process import ServerError

    try:
        demo.run(
            checkpoint=options.checkpoint,
            asked=options.ask or [],
            port=options.port,
            pace_s=options.pace,
            picture=options.save_picture,
        )
    except (InputError, ServerError) as error:
        print(f"vllm-dllm demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Watch a running server in the terminal: requests, steps per block, tokens per second."
    parser = commands.add_parser("top", help=text, description=text + " q or Ctrl-C ends it.")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="address of the server (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame as plain text and end")
    parser.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    from vllm_dllm.tools import top

    try:
        top.run(options.url.rstrip("/"), options.once)
    except InputError as error:
        print(f"vllm-dllm top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _add_checkpoint(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Print the folder of the small checkpoint of this package, for `vllm serve`."
    parser = commands.add_parser("checkpoint", help=text, description=text)
    parser.set_defaults(run=_checkpoint)


def _checkpoint(options: argparse.Namespace) -> int:
    print(SHIPPED_CHECKPOINT)
    return 0


def _add_quantize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Write a quantised copy of a checkpoint that `vllm serve` loads."
    parser = commands.add_parser("quantize", help=text, description=text)
    parser.add_argument("checkpoint", type=Path, help="folder of the unquantised checkpoint")
    parser.add_argument(
        "--scheme",
        required=True,
        choices=("fp8-dynamic", "int8", "nvfp4", "w4a16"),
        help="fp8-dynamic, int8: half the size; nvfp4, w4a16: less than a third. nvfp4 needs "
        "--calibration, and is for DiffusionGemma only",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="OUT", help="folder to write; must not exist"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="PROMPTS.jsonl",
        help='nvfp4: prompts to denoise, one {"messages": [...]} or {"prompt": "text"} per line',
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print which layers are quantised and which are left, with sizes; write nothing",
    )
    parser.set_defaults(run=_quantize)


def _quantize(options: argparse.Namespace) -> int:
    from vllm_dllm.tools.quantize import quantize  # late: it loads PyTorch

    return exit_status(
        "quantize",
        lambda: quantize.quantize(
            options.checkpoint,
            options.scheme,
            options.out,
            options.calibration,
            dry_run=options.dry_run,
        ),
    )


def _add_drafter(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Make block-diffusion drafters for speculative decoding."
    parser = commands.add_parser("drafter", help=text, description=text)
    subcommands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_train(subcommands)
    add_calibrate_width(subcommands)


def _add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Serve checkpoints one after the other; compare accuracy, speed and size."
    parser = commands.add_parser("eval", help=text, description=text)
    parser.add_argument(
        "checkpoints",
        nargs="+",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of a checkpoint; recovery is relative to the first one",
    )
    parser.add_argument(
        "--task",
        action="append",
        metavar="NAME|FILE.yaml",
        help="task of lm-evaluation-harness, such as gsm8k, or a task file; may be given several "
        "times (default: checkpoints/held_out.yaml)",
    )
    add_task_options(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("evaluation"),
        metavar="FOLDER",
        help="where eval.json and eval.png are written (default: %(default)s)",
    )
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> int:
    from vllm_dllm.tools.server_process import ServerError

    try:
        from vllm_dllm.tools import evaluate  # late: it loads PyTorch and lm-evaluation-harness
    except ModuleNotFoundError as error:
        say_what_is_missing("eval", error)
        return 1

    try:
        evaluate.run(
            options.checkpoints,
            evaluate.Settings(
                tasks=options.task or ["checkpoints/held_out.yaml"],
                data=options.data,
                api=options.api,
                limit=options.limit,
                concurrency=options.concurrency,
                serve_options=options.serve_options,
                out=options.out,
            ),
        )
    except (InputError, ServerError) as error:
        print(f"vllm-dllm eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Say how many requests of a checkpoint a GPU has room for. Needs no GPU."
    parser = commands.add_parser("plan", help=text, description=text)
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("--gpu", required=True, choices=tuple(GPUS))
    parser.add_argument(
        "--memory-gib", type=float, metavar="GIB", help="of each GPU (default: its data sheet's)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=8192,
        metavar="TOKENS",
        help="prompt and answer of a request (default: %(default)s)",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--kv-cache-dtype", choices=tuple(ELEMENT_BYTES), default="auto")
    parser.add_argument(
        "--limit-mm-per-prompt",
        type=_most_images,
        metavar="JSON",
        help="""'{"image": 0}' leaves the vision tower out, as it does in vllm serve""",
    )
    parser.set_defaults(run=_plan)


def _most_images(text: str) -> int | None:
    """Of vLLM's `--limit-mm-per-prompt`; None: it says nothing of images."""
    try:
        found = json.loads(text).get("image")
    except (ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(
            f"expected JSON like {{'image': 0}}, got {text}"
        ) from error
    if found is not None and (type(found) is not int or found < 0):
        raise argparse.ArgumentTypeError(f"image must be a number from 0 on, got {found!r}")
    return found


def _plan(options: argparse.Namespace) -> int:
    from vllm_dllm.tools.plan import capacity  # late: it loads transformers

    return exit_status(
        "plan",
        lambda: capacity.show(
            options.checkpoint,
            options.gpu,
            options.memory_gib,
            options.context,
            options.tensor_parallel_size,
            options.kv_cache_dtype,
            options.limit_mm_per_prompt,
        ),
    )
