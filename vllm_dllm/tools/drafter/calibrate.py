"""`vllm-dllm drafter calibrate-width`: trains a BlockPilot predictor for a target and its drafter.

It measures which block size is best for each prompt, and trains the predictor to tell. Measuring
takes nearly all the time. A stopped run continues after the last part that it has measured
(`resumable.py`).
"""

import copy
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from vllm_dllm.drafters.blockpilot import HIDDEN_SIZES, BlockPilot, PredictorConfig, save_predictor
from vllm_dllm.drafters.layout import check_drafter
from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
from vllm_dllm.tools.drafter import measurements, reference
from vllm_dllm.tools.drafter.measurements import Measurements
from vllm_dllm.tools.drafter.report import build_report, describe, save_plot
from vllm_dllm.tools.drafter.sequences import read_prompts, room_for_prompts
from vllm_dllm.tools.inputs import read_config
from vllm_dllm.tools.terminal import progress_bars

REPORT_FILE = "report.json"
PLOT_FILE = "report.png"
MEASURED_FOLDERS = ("training", "held-out")  # OUT does not keep these
HELD_OUT_SHARE = 0.25


def calibrate_width(
    target: Path,
    drafter: Path,
    prompts: Path,
    out: Path,
    *,
    variant: str,  # of the predictor: "full" or "small"
    radius: int,  # number of block sizes below the trained one to try
    max_tokens: int,  # the most tokens of an answer
    seed: int,
    device: str,
) -> None:
    """Writes a predictor, its report and a plot to `out`, which never exists unfinished, and prints
    the report. Raises InputError for input that cannot be used."""
    resumable.check_out(out)
    model = reference.load_drafter(drafter)
    text_config = read_config(target).get_text_config()
    check_drafter(model.config.to_dict(), text_config.to_dict(), str(drafter), str(target))
    sizes = measurements.candidate_sizes(model.config.block_size, radius)
    room = room_for_prompts(text_config.max_position_embeddings, max_tokens)
    sides = measurements.split_prompts(read_prompts(prompts, target, room), HELD_OUT_SHARE, seed)
    identity = {  # what the measurements depend on; the training may differ
        "weights": resumable.weight_marks(target) + resumable.weight_marks(drafter),
        "prompts": resumable.digest(sides),
        "block_sizes": sizes,
        "max_tokens": max_tokens,
    }
    run = resumable.Run(out, identity, "target, drafter, prompts or sizes", MEASURED_FOLDERS)
    if not run.is_finished():
        verifier = reference.load_target(target, device)
        run.start()
        measure_part = partial(
            measurements.measure, verifier, model.to(device), sizes=sizes, max_tokens=max_tokens
        )
        training, held_out = _measure_sides(sides, measure_part, run.partial)
        config = PredictorConfig(
            variant=variant,
            vocab_size=training.logits.shape[1],
            block_sizes=sizes,
            trained_block_size=model.config.block_size,
            hidden_size=HIDDEN_SIZES[variant],
        )
        predictor = train_predictor(training, config, seed)
        save_predictor(predictor, run.partial)
        report = build_report(predictor, training, held_out, seed)
        resumable.write_json(run.partial / REPORT_FILE, report)
        save_plot(report, run.partial / PLOT_FILE)
        run.finish()
    print(describe(json.loads((out / REPORT_FILE).read_text())))


def _measure_sides(
    sides: Sequence[list[list[int]]],  # token ids of the training prompts, of the held-out ones
    measure_part: Callable[[Sequence[list[int]]], Measurements],
    folder: Path,
) -> tuple[Measurements, Measurements]:
    """Returns the measurements of the training and of the held-out prompts. Keeps them in `folder`.
    Raises InputError if there are less than two of either."""
    measured: list[Measurements] = []
    with progress_bars() as progress:
        for name, prompts in zip(MEASURED_FOLDERS, sides, strict=True):
            (folder / name).mkdir(exist_ok=True)
            task = progress.add_task(f"measuring {name} prompts", total=len(prompts))
            advance = partial(progress.advance, task)
            measured.append(
                measurements.measure_in_parts(measure_part, prompts, folder / name, advance)
            )
    training, held_out = measured
    if min(len(training), len(held_out)) < 2:
        raise InputError(
            f"the target answers {len(training)} of the training and {len(held_out)} of the "
            f"held-out prompts with two tokens or more, expected at least 2 each: give prompts "
            f"that need longer answers"
        )
    return training, held_out


EPOCHS = 60
BATCH_SIZE = 64
LEARNING_RATES = {"full": 1e-4, "small": 3e-3}
WEIGHT_DECAY = 0.01
VALIDATION_SHARE = 0.15  # of the training prompts, to choose an epoch


def train_predictor(data: Measurements, config: PredictorConfig, seed: int) -> BlockPilot:
    """Returns a predictor trained on `data`, with the weights of the epoch with the lowest
    validation loss. Trains on the CPU, in seconds for a few thousand prompts. The same seed gives
    the same weights; PyTorch's global seed is set."""
    torch.manual_seed(seed)
    predictor = BlockPilot(config)
    order = torch.randperm(len(data))
    num_validation = max(1, round(VALIDATION_SHARE * len(data)))
    validation, training = data[order[:num_validation]], data[order[num_validation:]]
    predictor.fit_input_scale(training.logits)
    fixed = data.best_fixed
    inputs, labels = predictor.make_inputs(training.logits), training.labels(fixed)
    validation_inputs = predictor.make_inputs(validation.logits)
    validation_labels = validation.labels(fixed)
    optimizer = torch.optim.AdamW(
        predictor.parameters(), lr=LEARNING_RATES[config.variant], weight_decay=WEIGHT_DECAY
    )
    lowest, best = math.inf, predictor.state_dict()
    for _ in range(EPOCHS):
        predictor.train()
        for rows in torch.randperm(len(labels)).split(BATCH_SIZE):
            loss = F.cross_entropy(predictor(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        predictor.eval()
        with torch.no_grad():
            validation_loss = F.cross_entropy(
                predictor(validation_inputs), validation_labels
            ).item()
        if validation_loss < lowest:
            lowest, best = validation_loss, copy.deepcopy(predictor.state_dict())
    predictor.load_state_dict(best)
    return predictor
