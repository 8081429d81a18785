"""`vllm-dllm drafter calibrate-width`: makes a BlockPilot predictor for a target and its drafter.

Measuring takes nearly all the time; a stopped run continues after the last part it measured
(`resumable.py`).
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dllm.drafters.blockpilot import HIDDEN_SIZES, PredictorConfig, save_predictor
from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
from vllm_dllm.tools.drafter.calibration.data import (
    DRAFT_WIDTHS,
    Measured,
    candidate_sizes,
    measure,
    measure_in_parts,
    split_prompts,
)
from vllm_dllm.tools.drafter.calibration.predictor import train_predictor
from vllm_dllm.tools.drafter.calibration.report import build_report, describe, save_plot
from vllm_dllm.tools.drafter.training.collect import read_prompts
from vllm_dllm.tools.drafter.training.reference import WEIGHTS_FILE, load_drafter
from vllm_dllm.tools.drafter.training.target_states import (
    check_fit,
    load_target,
    target_text_config,
)
from vllm_dllm.tools.progress import progress_bars

REPORT_FILE = "report.json"
PLOT_FILE = "report.png"
MEASURED_FOLDERS = ("training", "held-out")  # OUT does not keep these
HELD_OUT_SHARE = 0.25


@dataclass(frozen=True)
class Options:
    variant: str = "small"
    base: int | None = None
    """Block size in the middle; None: the one the drafter was trained with."""
    radius: int = 2
    draft_width: str = "follow"
    """What a block size sets: "follow": draft and verification; "full": only the verification."""
    max_tokens: int = 256
    """Longest answer."""
    seed: int = 0


def calibrate_width(
    target_path: Path,
    drafter_path: Path,
    prompts_file: Path,
    out: Path,
    options: Options,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """Writes the predictor, its report and a plot to `out`; returns the report.

    Raises InputError for input that cannot be used; `out` never exists unfinished.
    """
    partial = resumable.partial_folder(out)
    _check_options(options)
    drafter = load_drafter(drafter_path)
    text_config = target_text_config(target_path)
    check_fit(drafter.config, text_config)
    trained = drafter.config.block_size
    sizes = candidate_sizes(trained, options.base or trained, options.radius)
    room = text_config.max_position_embeddings - options.max_tokens
    prompts = read_prompts(prompts_file, target_path, room)
    sides = split_prompts(prompts, HELD_OUT_SHARE, options.seed)

    run = _fingerprint(target_path, drafter_path, sides, sizes, options)
    if resumable.is_finished(out, run, MEASURED_FOLDERS):
        report = json.loads((out / REPORT_FILE).read_text())
        print(describe(report))
        return report
    resumable.is_resumed(partial, run, "target, drafter, prompts or sizes")
    target, drafter = load_target(target_path, device), drafter.to(device)

    def measure_part(part: Sequence[list[int]]) -> Measured:
        return measure(target, drafter, part, sizes, options.draft_width, options.max_tokens)

    resumable.start(partial, run)
    training, held_out = _measure_sides(measure_part, sides, partial)
    report = _train_and_report(training, held_out, sizes, trained, options, partial)
    resumable.finish(partial, out, MEASURED_FOLDERS)
    print(describe(report))
    return report


def _check_options(options: Options) -> None:
    if options.variant not in HIDDEN_SIZES or options.draft_width not in DRAFT_WIDTHS:
        raise InputError(
            f"expected a variant of {', '.join(HIDDEN_SIZES)} and a draft width of "
            f"{', '.join(DRAFT_WIDTHS)}, got {options.variant!r} and {options.draft_width!r}"
        )


def _measure_sides(
    measure_part: Callable[[Sequence[list[int]]], Measured],
    sides: tuple[list[list[int]], list[list[int]]],  # training and held-out prompts
    partial: Path,
) -> list[Measured]:
    """Measures each side's prompts; parts that a stopped run has measured are read."""
    measured: list[Measured] = []
    with progress_bars() as progress:
        for name, side in zip(MEASURED_FOLDERS, sides, strict=True):
            folder = partial / name
            folder.mkdir(exist_ok=True)
            task = progress.add_task(f"measuring {name} prompts", total=len(side))
            advance = functools.partial(progress.advance, task)
            measured.append(measure_in_parts(measure_part, side, folder, advance))
    training, held_out = map(len, measured)
    if min(training, held_out) < 2:
        raise InputError(
            f"the target answers {training} of the training and {held_out} of the held-out "
            f"prompts with two tokens or more, expected at least 2 each: give prompts that need "
            f"longer answers"
        )
    return measured


def _train_and_report(
    training: Measured,
    held_out: Measured,
    sizes: tuple[int, ...],
    trained_size: int,
    options: Options,
    partial: Path,
) -> dict[str, Any]:
    """Writes the predictor, its report and a plot to `partial`; returns the report."""
    config = PredictorConfig(
        variant=options.variant,
        vocab_size=training.logits.shape[1],
        block_sizes=sizes,
        trained_block_size=trained_size,
        hidden_size=HIDDEN_SIZES[options.variant],
    )
    found = train_predictor(training, config, options.seed)
    report = {
        "draft_width": options.draft_width,
        "variant": options.variant,
        "seed": options.seed,
        "weights_bytes_bf16": config.memory_bytes(),
        **build_report(found, training, held_out, options.seed),
    }
    save_predictor(found.predictor, partial, {"draft_width": options.draft_width})
    (partial / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    save_plot(report, partial / PLOT_FILE)
    return report


def _fingerprint(
    target: Path,
    drafter: Path,
    sides: tuple[list[list[int]], list[list[int]]],
    sizes: tuple[int, ...],
    options: Options,
) -> dict[str, Any]:
    """What the measurements depend on; the training may differ."""
    files = [*sorted(target.glob("*.safetensors")), drafter / WEIGHTS_FILE]
    return {
        "weights": resumable.file_marks(files),
        "prompts": resumable.digest(sides),
        "block_sizes": list(sizes),
        "draft_width": options.draft_width,
        "max_tokens": options.max_tokens,
    }
