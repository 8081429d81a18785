"""The command line of `vllm-dllm drafter calibrate-width`."""

import argparse
from pathlib import Path

from vllm_dllm.tools.resumable import exit_status


def add_calibrate_width(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `calibrate-width` to the sub-commands of `vllm-dllm drafter`."""
    text = (
        "Measure which block size suits each prompt, and train the predictor of the width policy "
        "`blockpilot` on it."
    )
    parser = commands.add_parser("calibrate-width", help=text, description=text)
    parser.add_argument("--target", type=Path, required=True, metavar="MODEL", help="folder")
    parser.add_argument("--drafter", type=Path, required=True, metavar="MODEL", help="folder")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help='one {"messages": [...]} or {"prompt": "text"} per line; a quarter is held out',
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, help="folder to write; must not exist"
    )
    parser.add_argument(
        "--variant",
        choices=("full", "small"),
        default="small",
        help="full: the paper's, as wide as the vocabulary; small: 18 numbers (default)",
    )
    parser.add_argument(
        "--radius",
        type=int,
        default=2,
        metavar="K",
        help="block sizes within K of the base, none above the trained one (default: %(default)s)",
    )
    parser.add_argument(
        "--base", type=int, metavar="SIZE", help="default: the block the drafter was trained with"
    )
    parser.add_argument(
        "--draft-width",
        choices=("follow", "full"),
        default="follow",
        help="follow: draft a block of that size (default); full: always draft the trained block "
        "and verify part of it",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.set_defaults(run=_calibrate_width)


def _calibrate_width(options: argparse.Namespace) -> int:
    from vllm_dllm.tools.drafter.calibration import calibrate  # late: it loads PyTorch

    return exit_status(
        "drafter calibrate-width",
        lambda: calibrate.calibrate_width(
            options.target,
            options.drafter,
            options.prompts,
            options.out,
            calibrate.Options(
                variant=options.variant,
                base=options.base,
                radius=options.radius,
                draft_width=options.draft_width,
                max_tokens=options.max_tokens,
                seed=options.seed,
            ),
            device=options.device,
        ),
    )
