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
    target: Path, drafter: Path, prompts: Path, out: Path, *, device: str = "cpu", **options: Any
) -> None:
    """Writes the predictor, its report and a plot to `out`. The options are the fields of
    `Options`. Raises InputError for input that cannot be used; `out` never exists unfinished.
    """
    settings = Options(**options)
    partial = resumable.partial_folder(out)
    model = load_drafter(drafter)
    text_config = target_text_config(target)
    check_fit(model.config, text_config, (str(drafter), str(target)))
    trained = model.config.block_size
    sizes = candidate_sizes(trained, settings.base or trained, settings.radius)
    room = text_config.max_position_embeddings - settings.max_tokens
    sides = split_prompts(read_prompts(prompts, target, room), HELD_OUT_SHARE, settings.seed)
    run = _fingerprint(target, drafter, sides, sizes, settings)
    if not resumable.is_finished(out, run, MEASURED_FOLDERS):
        resumable.is_resumed(partial, run, "target, drafter, prompts or sizes")
        verifier, model = load_target(target, device), model.to(device)

        def measure_part(part: Sequence[list[int]]) -> Measured:
            return measure(verifier, model, part, sizes, settings.draft_width, settings.max_tokens)

        resumable.start(partial, run)
        training, held_out = _measure_sides(measure_part, sides, partial)
        _train_and_report(training, held_out, sizes, trained, settings, partial)
        resumable.finish(partial, out, MEASURED_FOLDERS)
    print(describe(json.loads((out / REPORT_FILE).read_text())))


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
) -> None:
    """Writes the predictor, its report and a plot to `partial`."""
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
