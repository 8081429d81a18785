"""Quantises a checkpoint of DiffusionGemma or of a masked model, in compressed-tensors' format.

Weights are read one tensor at a time and written one shard at a time. Only calibration loads the
model. A stopped run continues after the last shard that it has written (`resumable.py`).
"""

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from rich.progress import Progress
from transformers import DiffusionGemmaConfig

from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import INDEX_FILE, open_shard, save_tensors
from vllm_dllm.tools import resumable
from vllm_dllm.tools.quantize.calibrate import calibrate, read_prompts
from vllm_dllm.tools.quantize.plan import (
    Linear,
    Plan,
    describe,
    make_plan,
    quantization_config,
    quantization_scheme,
)
from vllm_dllm.tools.quantize.source import Source, read_source
from vllm_dllm.tools.resumable import write_json
from vllm_dllm.tools.terminal import progress_bars

WEIGHT_RANGES_FILE = "weight_ranges.json"
INPUT_RANGES_FILE = "input_ranges.json"
WORKING_FILES = (WEIGHT_RANGES_FILE, INPUT_RANGES_FILE)  # OUT does not keep these

COPIED = (
    *("*tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("generation_config.json", "chat_template*", "*processor_config.json", "LICENSE*"),
)
"""Patterns of the files that are copied as they are."""


def quantize(
    checkpoint: Path,
    scheme: str,
    out: Path | None,
    calibration: Path | None = None,
    *,
    dry_run: bool = False,
) -> None:
    """Writes the quantised checkpoint to `out`; with `dry_run` only prints what it would contain.

    Raises InputError for input that cannot be used; `out` is not created then.
    """
    source = read_source(checkpoint)
    plan = make_plan(scheme, source)
    if dry_run:
        print(describe(plan, source.tensors))
        return
    if out is None:
        raise InputError("expected the folder to write to (-o OUT), or --dry-run")
    resumable.check_out(out)
    prompts = _read_calibration(calibration, scheme, source)
    identity = {
        "scheme": scheme,
        "config": source.config,
        "weights": resumable.weight_marks(checkpoint),
        "prompts": resumable.digest(prompts),
    }
    run = resumable.Run(out, identity, "checkpoint, scheme or prompts", WORKING_FILES)
    if run.is_finished():
        return
    with progress_bars() as progress:
        ranges_file = run.partial / WEIGHT_RANGES_FILE
        if ranges_file.exists():  # of a run that was stopped
            weight_amax = json.loads(ranges_file.read_text())
        else:
            weight_amax = _find_weight_amax(source, plan, progress)
        run.start()
        write_json(ranges_file, weight_amax)
        input_amax = _find_input_amax(checkpoint, prompts, run.partial, progress)
        task = progress.add_task(f"quantising to {plan.scheme}", total=len(source.tensors))
        for name, tensors in source.shards.items():
            if (run.partial / name).exists():  # of a run that was stopped
                progress.advance(task, len(tensors))
            else:
                advance = partial(progress.advance, task)
                shard = _quantize_shard(source, plan, name, weight_amax, input_amax, advance)
                save_tensors(shard, run.partial / name)
    _write_rest(source, plan, run.partial)
    run.finish()


def _read_calibration(path: Path | None, scheme: str, source: Source) -> list[list[int]]:
    """Returns the token ids of the prompts in the file `path`; [] for a scheme that measures no
    inputs. Raises InputError if the scheme and the file do not go together, or the file cannot be
    used."""
    if scheme == "nvfp4" and path is None:
        raise InputError(
            "nvfp4 needs --calibration PROMPTS.jsonl: the scale of the inputs is measured while "
            "the model denoises answers to them"
        )
    if scheme != "nvfp4" and path is not None:
        raise InputError(
            f"{scheme} takes no --calibration: inputs are scaled token by token when served"
        )
    if path is None:
        return []
    return read_prompts(path, source.path, DiffusionGemmaConfig.from_dict(source.config))


def _find_weight_amax(source: Source, plan: Plan, progress: Progress) -> dict[str, float]:
    """Returns each weight group's largest magnitude. Raises InputError for a NaN or infinity."""
    task = progress.add_task("checking weights", total=len(source.tensors))
    largest: dict[str, float] = defaultdict(float)
    for file_name, tensors in source.shards.items():
        with open_shard(source.path / file_name) as file:
            for name in tensors:
                weight = file.get_tensor(name)
                _check_finite(weight, f"{source.path / file_name}: {name}")
                for linear in plan.quantized.get(name, ()):
                    amax = _linear_weight(weight, linear).abs().amax().item()
                    largest[linear.weight_group] = max(largest[linear.weight_group], amax)
                progress.advance(task)
    return largest


def _check_finite(weight: torch.Tensor, name: str) -> None:
    """Raises InputError for a NaN or infinity. `name` is the tensor's, for the message."""
    if weight.is_floating_point() and not weight.isfinite().all():
        raise InputError(
            f"{name} holds NaN or infinity: expected finite weights; copy the file again or "
            f"repair the checkpoint"
        )


def _linear_weight(weight: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Returns the part [out, in] of a tensor that is the weight of a linear."""
    matrix = weight if linear.expert is None else weight[linear.expert]
    return matrix[linear.rows]


def _find_input_amax(
    checkpoint: Path, prompts: list[list[int]], folder: Path, progress: Progress
) -> dict[str, float]:
    """Returns each input group's largest magnitude while the model answers; {} without prompts.
    Keeps what it has measured in `folder`. Warns of experts that saw no token."""
    if not prompts:
        return {}
    task = progress.add_task("calibrating, prompts", total=len(prompts))
    advance = partial(progress.advance, task)
    ranges = calibrate(checkpoint, prompts, folder / INPUT_RANGES_FILE, advance)
    # Experts that saw no token get the scale of their layer, like all. Many of them mean that the
    # prompts are too few.
    idle = {
        group.removesuffix(".gate_up_proj"): sum(value == 0 for value in values)
        for group, values in ranges.items()
        if group.endswith(".experts.gate_up_proj") and 0 in values
    }
    if idle:
        print(
            f"{sum(idle.values())} experts in {len(idle)} layers saw no token of the calibration "
            f"prompts; they get the scales of their layer. More varied prompts reach more experts.",
            file=sys.stderr,
        )
    return {group: max(values) for group, values in ranges.items()}


def quantize_linear(
    weight: torch.Tensor,  # [out, in]
    scheme: QuantizationScheme,
    weight_amax: float,
    input_amax: float | None,
) -> dict[str, torch.Tensor]:
    """Returns the quantised tensors of a linear by their names in the checkpoint, such as
    `weight_packed` and `weight_scale`. compressed-tensors computes them.

    Scales are computed in fp32; w4a16 rounds them to bf16 before it rounds weights. Only nvfp4 has
    global scales, of the largest magnitude of weights or inputs that share one.
    """
    args, weight = scheme.weights, weight.float()
    parts = {"weight": weight}
    if args.group_size is None:
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    else:
        groups = weight.unflatten(-1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
        if args.strategy == QuantizationStrategy.TENSOR_GROUP:
            parts["weight_global_scale"] = _global_scale(weight_amax)
    parts["weight_scale"], _ = calculate_qparams(
        low, high, args, global_scale=parts.get("weight_global_scale")
    )
    if args.strategy == QuantizationStrategy.GROUP:  # two bytes for 32 weights
        parts["weight_scale"] = parts["weight_scale"].to(torch.bfloat16)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    # compressed-tensors compiles a helper, which takes longer than it saves and needs a compiler.
    with torch.compiler.set_stance("force_eager"):
        parts = compressor.compress(parts, scheme)
    if input_amax is not None:
        parts["input_global_scale"] = _global_scale(input_amax)
    return parts


def _global_scale(amax: float) -> torch.Tensor:
    return generate_gparam(torch.tensor(-amax), torch.tensor(amax))


def _quantize_shard(
    source: Source,
    plan: Plan,
    file_name: str,
    weight_amax: dict[str, float],  # of all shards, by weight group
    input_amax: dict[str, float],  # by input group; {}: inputs are scaled while serving
    advance: Callable[[], None],
) -> dict[str, torch.Tensor]:
    """Returns the tensors of one shard of the quantised checkpoint. Calls `advance` after each of
    the source's."""
    scheme = quantization_scheme(plan.scheme)
    shard: dict[str, torch.Tensor] = {}
    with open_shard(source.path / file_name) as file:
        for name in source.shards[file_name]:
            weight = file.get_tensor(name)
            for linear in plan.quantized.get(name, ()):
                parts = quantize_linear(
                    _linear_weight(weight, linear),
                    scheme,
                    weight_amax[linear.weight_group],
                    input_amax.get(linear.input_group),
                )
                for part, tensor in parts.items():
                    shard[f"{linear.module}.{part}"] = tensor.contiguous()
            if name in plan.kept:
                shard[name] = weight
            advance()
    return shard


def _write_rest(source: Source, plan: Plan, folder: Path) -> None:
    """Writes the index and config.json into `folder`, and copies tokenizer, licence and similar
    files there."""
    if source.has_index:
        weight_map: dict[str, str] = {}
        total_size = 0
        for file_name in source.shards:
            with open_shard(folder / file_name) as file:
                names = list(file.keys())
                weight_map |= dict.fromkeys(names, file_name)
                total_size += sum(file.get_tensor(name).nbytes for name in names)
        weight_map = dict(sorted(weight_map.items()))
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)
    for pattern in COPIED:
        for path in sorted(source.path.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    config = {**source.config, "quantization_config": quantization_config(plan)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
