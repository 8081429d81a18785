"""`vllm-dllm drafter calibrate-width`: trains a BlockPilot predictor for a target and its drafter,
and reports what it gains on prompts that it was not trained on.

It measures which block size is best for each prompt, and trains the predictor to tell. Measuring
takes nearly all the time. A stopped run continues after the last part that it has measured
(`resumable.py`).

The report compares the predictor with the best fixed size, chosen on the training prompts, and with
the oracle, which knows the best size of each prompt. A predictor as good as the oracle has seen the
answers. The paper's predictor has seen them: on all 64 prompts whose choices were published
(AMAP-ML/BlockPilot, utils/*/1.json) it chose the oracle's size. There the oracle is 3.5 % (GSM8K)
and 4.0 % (MATH-500) better than a fixed 16. With no sizes above the trained 16, it is 1.3 % and
1.2 % better.
"""

import copy
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from vllm_dllm.drafters.blockpilot import HIDDEN_SIZES, BlockPilot, PredictorConfig, save_predictor
from vllm_dllm.drafters.layout import check_drafter
from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
from vllm_dllm.tools.drafter import measurements, reference
from vllm_dllm.tools.drafter.measurements import Measurements
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


RESAMPLES = 2000  # of the held-out prompts, for confidence intervals
LEAK_SHARE = 0.95  # of the way from the best fixed size to the oracle
LEAST_ROOM = 0.01  # share of τ; if the oracle gains less, LEAK_SHARE of its gain means nothing


def build_report(
    predictor: BlockPilot, training: Measurements, held_out: Measurements, seed: int
) -> dict[str, Any]:
    """Returns the report's numbers, ready for JSON. τ is the mean over prompts, as in the paper.
    `pooled_tau` weighs all verifications equally, which decides how long answers take."""
    sizes = predictor.config.block_sizes
    fixed = training.best_fixed
    predicted = predictor.predict_widths(held_out.logits) + 1  # with the anchor
    chosen = torch.searchsorted(torch.tensor(sizes), predicted)
    labels = held_out.labels(fixed)
    commonest = training.labels(fixed).mode().values
    policies = {
        "blockpilot": chosen,
        "best_fixed": torch.full_like(labels, fixed),
        "oracle": held_out.smallest_best,
    }
    numbers = {name: _measure_policy(held_out, sizes, index) for name, index in policies.items()}
    numbers["best_fixed"]["block_size"] = sizes[fixed]
    fixed_tau = numbers["best_fixed"]["tau"]
    room = numbers["oracle"]["tau"] - fixed_tau
    gain = numbers["blockpilot"]["tau"] - fixed_tau
    gains = _select(held_out.tau, chosen) - _select(held_out.tau, policies["best_fixed"])
    low, high = _confidence_interval(gains, seed)
    share = gain / room if room > 0 else 0.0
    return {
        "variant": predictor.config.variant,
        "seed": seed,
        "held_out": numbers,
        "held_out_fixed": {
            str(size): _measure_policy(held_out, sizes, torch.full_like(labels, i))
            for i, size in enumerate(sizes)
        },
        "gain_over_best_fixed": gain / fixed_tau,
        "gain_95_percent": [bound / fixed_tau for bound in (low, high)],
        "oracle_over_best_fixed": room / fixed_tau,
        "share_of_oracle": share,
        "better_than_best_fixed": low > 0,
        "looks_like_a_leak": share >= LEAK_SHARE and room >= LEAST_ROOM * fixed_tau,
        "accuracy": (chosen == labels).double().mean().item(),
        "accuracy_of_the_commonest_label": (labels == commonest).double().mean().item(),
        "labels": {
            str(size): [int((data.labels(fixed) == i).sum()) for data in (training, held_out)]
            for i, size in enumerate(sizes)
        },
        "prompts": [len(training), len(held_out)],
    }


def _select(values: Tensor, index: Tensor) -> Tensor:
    """Returns [n]: of each row of `values` [n, S] the entry at its place in `index` [n] int64."""
    return values.gather(1, index[:, None]).squeeze(1)


def _measure_policy(data: Measurements, sizes: tuple[int, ...], index: Tensor) -> dict[str, float]:
    """Returns the numbers of a policy that chooses the size at place `index` [n] int64 of `sizes`
    for each prompt."""
    emitted, verifications = _select(data.emitted, index), _select(data.verifications, index)
    drafted = (torch.tensor(sizes)[index] - 1) * verifications
    return {
        "tau": _select(data.tau, index).mean().item(),
        "pooled_tau": (emitted.sum() / verifications.sum()).item(),
        "verified_a_token": (drafted.sum() / emitted.sum()).item(),
    }


def _confidence_interval(differences: Tensor, seed: int) -> tuple[float, float]:
    """Returns the two bounds between which 95 % of the means of resampled prompts lie."""
    values = differences.numpy()
    rows = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[rows].mean(1), (2.5, 97.5))
    return float(low), float(high)


def describe(report: dict[str, Any]) -> str:
    """Returns the numbers of `build_report` as a few lines of text."""
    numbers, lines = report["held_out"], []
    training, held_out = report["prompts"]
    lines.append(f"Trained on {training} prompts, {held_out} others held out:")
    names = {
        "best_fixed": f"block size {numbers['best_fixed']['block_size']} for all",
        "blockpilot": "predicted",
        "oracle": "the best for each prompt",
    }
    for name, text in names.items():
        row = numbers[name]
        lines.append(
            f"  {text:26} τ {row['tau']:.3f}   {row['verified_a_token']:.2f} drafted tokens "
            f"verified for each emitted"
        )
    low, high = report["gain_95_percent"]
    lines.append(
        f"  gain {report['gain_over_best_fixed']:+.2%} (95 %: {low:+.2%} to {high:+.2%}), "
        f"the oracle's {report['oracle_over_best_fixed']:+.2%}"
    )
    if report["looks_like_a_leak"]:
        lines.append(
            "  This is too good: a predictor that equals the oracle has seen the held-out answers."
        )
    elif not report["better_than_best_fixed"]:
        lines.append("  The predictor is not better than the best fixed block size.")
    return "\n".join(lines)


def save_plot(report: dict[str, Any], file: Path) -> None:
    """Writes a plot to `file`: τ of every fixed size and of the policies, and how often each size
    is best."""
    sizes = [int(size) for size in report["held_out_fixed"]]
    figure = Figure(figsize=(10, 4), layout="tight")
    left, right = figure.subplots(1, 2)
    fixed = [row["tau"] for row in report["held_out_fixed"].values()]
    left.plot(sizes, fixed, "o-", color="tab:gray", label="fixed")
    for name, color in (("blockpilot", "tab:blue"), ("oracle", "tab:green")):
        left.axhline(report["held_out"][name]["tau"], color=color, label=name)
    left.set(xlabel="block size", ylabel="τ on held-out prompts", xticks=sizes)
    left.legend()
    for place, split in enumerate(("training", "held out")):
        counts = np.array([counts[place] for counts in report["labels"].values()])
        offsets = np.array(sizes) + 0.4 * place - 0.2
        right.bar(offsets, counts / counts.sum(), 0.4, label=split)
    right.set(xlabel="label: best block size", ylabel="share of prompts", xticks=sizes)
    right.legend()
    figure.savefig(file, dpi=80)
