"""The command `vllm-dllm`: reads the command line and calls the module that does the work."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_dllm.drafters.calibration.cli import add_calibrate_width


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command; returns the exit status."""
    options = _parser().parse_args(argv)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-dllm", description="Tools around serving diffusion language models with vLLM."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_quantize(commands)
    _add_drafter(commands)
    _add_eval(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Start a server, ask a few questions, show the canvas denoising, stop the server."
    parser = commands.add_parser("demo", help=text, description=text)
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        default=Path("checkpoints/diffusiongemma-tiny"),
        help="folder of the checkpoint to serve (default: %(default)s)",
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
        help="also draw the first answer, one row a step, into an SVG file",
    )
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from vllm_dllm import demo  # late: it loads more than the other commands need
    from vllm_dllm.serving_process import ServerError

    try:
        demo.run(
            checkpoint=options.checkpoint,
            questions=options.ask or demo.QUESTIONS,
            port=options.port,
            pace_s=options.pace,
            picture=options.save_picture,
        )
    except (demo.DemoError, ServerError) as error:
        print(f"vllm-dllm demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _add_quantize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Write an FP8 or NVFP4 copy of a DiffusionGemma checkpoint that `vllm serve` loads."
    parser = commands.add_parser("quantize", help=text, description=text)
    parser.add_argument("checkpoint", type=Path, help="folder of the unquantised checkpoint")
    parser.add_argument(
        "--scheme",
        required=True,
        choices=("fp8-dynamic", "nvfp4"),
        help="fp8-dynamic: half the size; nvfp4: less than a third, needs --calibration",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="OUT", help="folder to write; must not exist"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="PROMPTS.jsonl",
        help='nvfp4: prompts to denoise, one {"messages": [...]} or {"prompt": "text"} a line',
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print which layers are quantised and which are left, with sizes; write nothing",
    )
    parser.set_defaults(run=_quantize)


def _quantize(options: argparse.Namespace) -> int:
    from vllm_dllm.checkpoint import quantize, quantize_source  # late: they load PyTorch

    try:
        quantize.quantize(
            options.checkpoint,
            options.scheme,
            options.out,
            options.calibration,
            dry_run=options.dry_run,
        )
    except quantize_source.QuantizeError as error:
        print(f"vllm-dllm quantize: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm-dllm quantize: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _add_drafter(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Make block-diffusion drafters for speculative decoding."
    parser = commands.add_parser("drafter", help=text, description=text)
    subcommands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_drafter_train(subcommands)
    add_calibrate_width(subcommands)


def _add_drafter_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "Train a DFlash drafter for your model, which `vllm serve` loads. The same command goes on "
        "where a stopped one was."
    )
    parser = commands.add_parser("train", help=text, description=text)
    parser.add_argument(
        "--target", type=Path, required=True, metavar="MODEL", help="folder of the model to draft"
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="OUT", help="folder to write; a new one"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='prompts to answer, one {"messages": [...]} or {"prompt": "text"} a line',
    )
    parser.add_argument(
        "--server", metavar="URL", help="vLLM server of the target that answers the prompts"
    )
    parser.add_argument(
        "--from-buffer",
        type=Path,
        metavar="DIR",
        help="instead of prompts: blocks that a serving drafter, --init-from, got right and wrong",
    )
    parser.add_argument(
        "--init-from", type=Path, metavar="DRAFTER", help="drafter to go on with, its layout too"
    )
    parser.add_argument("--block-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--layers", type=int, default=3, help="of the drafter (default: %(default)s)"
    )
    parser.add_argument(
        "--target-layers",
        type=_layer_ids,
        metavar="I,J,…",
        help="target layers whose outputs are the context, the first is 0 (default: spread evenly)",
    )
    parser.add_argument(
        "--mask-token", metavar="TOKEN", help="default: the mask token of the target's tokenizer"
    )
    parser.add_argument("--minutes", type=float, help="length of the training, or --steps")
    parser.add_argument("--steps", type=int, help="length of the training, or --minutes")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)"
    )
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.set_defaults(run=_drafter_train)


def _layer_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _drafter_train(options: argparse.Namespace) -> int:
    import torch  # late, as everything that takes seconds to load

    from vllm_dllm.drafters.training import reference, train

    try:
        train.train(
            options.target,
            options.out,
            train.Options(
                block_size=options.block_size,
                num_layers=options.layers,
                target_layer_ids=options.target_layers,
                mask_token=options.mask_token,
                minutes=options.minutes,
                steps=options.steps,
                seed=options.seed,
                max_tokens=options.max_tokens,
            ),
            prompts=options.prompts,
            server=options.server,
            from_buffer=options.from_buffer,
            init_from=options.init_from,
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )
    except reference.DrafterError as error:
        print(f"vllm-dllm drafter train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "vllm-dllm drafter train: stopped; the same command goes on from here", file=sys.stderr
        )
        return 130
    return 0


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
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("."),
        metavar="FOLDER",
        help="folder of the data sets of tasks given by name, OWNER/NAME each (default: "
        "%(default)s); then Hugging Face's cache is searched, and nothing is downloaded",
    )
    parser.add_argument(
        "--api",
        choices=("chat", "completions"),
        default="chat",
        help="whether prompts go through the chat template (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N prompts of each task only")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=32,
        metavar="N",
        help="prompts at once (default: %(default)s)",
    )
    parser.add_argument(
        "--serve-options",
        type=shlex.split,
        metavar="OPTIONS",
        help="of `vllm serve`, all in one: --serve-options='--dtype float32' (default: none; on a "
        "machine without a GPU --max-model-len 1024 --kv-cache-memory-bytes 1G)",
    )
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
    from vllm_dllm.serving_process import ServerError

    try:
        from vllm_dllm import evaluate  # late: it loads PyTorch and lm-evaluation-harness
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("datasets", "lm_eval"):
            raise
        print(
            f"vllm-dllm eval: there is no {package} here: pip install 'vllm-dllm[eval]'",
            file=sys.stderr,
        )
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
                serve_options=options.serve_options or evaluate.default_serve_options(),
                out=options.out,
            ),
        )
    except (evaluate.EvaluateError, ServerError) as error:
        print(f"vllm-dllm eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
