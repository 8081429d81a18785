"""The command line of `vllm-dllm drafter train`."""

import argparse
from pathlib import Path

from vllm_dllm.tools.resumable import exit_status


def add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `train` to the sub-commands of `vllm-dllm drafter`."""
    text = (
        "Train a DFlash drafter for your model, ready for `vllm serve`. After an interruption the "
        "same command continues."
    )
    parser = commands.add_parser("train", help=text, description=text)
    _add_sources(parser)
    _add_shape_and_length(parser)
    parser.set_defaults(run=_train)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=Path,
        required=True,
        metavar="MODEL",
        help="folder of the model to draft for",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="OUT",
        help="folder to write; must not exist",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='prompts to answer, one {"messages": [...]} or {"prompt": "text"} per line',
    )
    parser.add_argument(
        "--server", metavar="URL", help="vLLM server of the target, to answer the prompts"
    )
    parser.add_argument(
        "--from-buffer",
        type=Path,
        metavar="DIR",
        help="instead of prompts: blocks that the drafter --init-from recorded while it served",
    )
    parser.add_argument(
        "--init-from",
        type=Path,
        metavar="DRAFTER",
        help="drafter to continue from; its layout is kept",
    )


def _add_shape_and_length(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--layers", type=int, default=3, help="of the drafter (default: %(default)s)"
    )
    parser.add_argument(
        "--target-layers",
        type=_layer_ids,
        metavar="I,J,…",
        help="target layers whose outputs are the context, from 0 (default: spread evenly)",
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


def _layer_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _train(options: argparse.Namespace) -> int:
    import torch  # late, like everything that takes seconds to load

    from vllm_dllm.tools.drafter.training.options import Options
    from vllm_dllm.tools.drafter.training.train import train

    return exit_status(
        "drafter train",
        lambda: train(
            options.target,
            options.out,
            Options(
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
        ),
    )
