"""Trains a DFlash drafter for any causal language model: `vllm-dllm drafter train`.

The target answers the prompts once (`collect.py`). Every step (`fit.py`) then runs the real target
over some of those sequences, takes the states of the chosen layers, puts blocks after random
anchors and lowers the loss of what the drafter guesses there (`loss.py`). A stopped run can be
continued (`resumable.py`).
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
from vllm_dllm.tools.drafter.training.blocks import KnownSequence
from vllm_dllm.tools.drafter.training.collect import (
    Completer,
    collect,
    complete,
    read_prompts,
    server_completer,
)
from vllm_dllm.tools.drafter.training.fit import STATE_FILE, fit
from vllm_dllm.tools.drafter.training.new_drafter import initialize, new_config
from vllm_dllm.tools.drafter.training.options import Options
from vllm_dllm.tools.drafter.training.plots import save_plots
from vllm_dllm.tools.drafter.training.read_buffer import read_buffer
from vllm_dllm.tools.drafter.training.reference import DFlashDrafter, load_drafter, save_drafter
from vllm_dllm.tools.drafter.training.target_states import (
    check_fit,
    load_target,
    target_text_config,
)

COMPLETIONS_FILE = "completions.jsonl"
WORKING_FILES = (COMPLETIONS_FILE, STATE_FILE)  # OUT does not keep these
LOG_FILE = "training_log.json"


def train(
    target_path: Path,
    out: Path,
    options: Options,
    *,
    prompts: Path | None = None,
    server: str | None = None,
    from_buffer: Path | None = None,
    init_from: Path | None = None,
    device: str = "cpu",
) -> None:
    """Writes a drafter to `out`. Raises InputError for input that cannot be used; `out` never
    exists unfinished.

    Sequences come from `prompts`, which the target or the `server` answers, or from the buffer of
    a serving drafter, which must be `init_from`.
    """
    partial = resumable.partial_folder(out)
    _check_arguments(options, prompts, server, from_buffer, init_from)
    text_config = target_text_config(target_path)
    start = load_drafter(init_from) if init_from else None
    if start is None:
        config = new_config(target_path, text_config, options)
    else:
        config = start.config
        check_fit(config, text_config)
    sequences: list[KnownSequence] = []
    questions: list[list[int]] = []
    if from_buffer:
        sequences = read_buffer(from_buffer, config.vocab_size)
    elif prompts:
        room = text_config.max_position_embeddings - options.max_tokens
        questions = read_prompts(prompts, target_path, room)
    run = _fingerprint(target_path, init_from, server, options, sequences or questions)
    if resumable.is_finished(out, run, WORKING_FILES):
        return
    resumable.is_resumed(partial, run, "target, other sequences or options")
    completer = server_completer(server, options.max_tokens, config.vocab_size) if server else None
    target = load_target(target_path, device)
    resumable.start(partial, run)
    if questions:
        completer = completer or (lambda batch: complete(target, batch, options.max_tokens))
        sequences = _answered(questions, completer, partial)
    drafter = _new_drafter(config, start, options.seed)
    log = fit(target, drafter.to(device), sequences, options, partial)
    dflash: dict[str, Any] = config.dflash_config
    if start is None or "trained_context" in dflash:  # unknown for a published drafter
        longest = max(len(sequence.tokens) for sequence in sequences)
        dflash["trained_context"] = max(longest, dflash.get("trained_context", 0))
    save_drafter(drafter, partial, torch.bfloat16)
    (partial / LOG_FILE).write_text(json.dumps(log) + "\n")
    save_plots(log, partial)
    resumable.finish(partial, out, WORKING_FILES)


def _answered(
    questions: list[list[int]], completer: Completer, partial: Path
) -> list[KnownSequence]:
    """The questions with their answers. What a stopped run has asked is read from its file."""
    sequences = collect(questions, completer, partial / COMPLETIONS_FILE, _report_collecting)
    if not sequences:
        raise InputError(
            f"the target answers none of the {len(questions)} prompts with two tokens or more: "
            f"give prompts that need longer answers"
        )
    return sequences


def _new_drafter(config: Qwen3Config, start: DFlashDrafter | None, seed: int) -> DFlashDrafter:
    """Random weights, or those of `start`."""
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config)
    initialize(drafter)
    if start is not None:
        drafter.load_state_dict(start.state_dict())
    return drafter


def _check_arguments(
    options: Options,
    prompts: Path | None,
    server: str | None,
    from_buffer: Path | None,
    init_from: Path | None,
) -> None:
    if (prompts is None) == (from_buffer is None):
        raise InputError("expected either --prompts FILE.jsonl or --from-buffer DIR")
    if server is not None and prompts is None:
        raise InputError("--server answers prompts: expected --prompts FILE.jsonl as well")
    if from_buffer is not None and init_from is None:
        raise InputError(
            "--from-buffer continues with the drafter that filled the buffer: name it with "
            "--init-from DRAFTER"
        )
    if (options.minutes is None) == (options.steps is None):
        raise InputError("expected either --minutes or --steps")


def _fingerprint(
    target: Path,
    init_from: Path | None,
    server: str | None,
    options: Options,
    sources: Sequence[Any],
) -> dict[str, Any]:
    def weights(folder: Path) -> list[list[Any]]:
        return resumable.file_marks(sorted(folder.glob("*.safetensors")))

    return {
        "target": weights(target),
        "init_from": weights(init_from) if init_from else None,
        "server": server,
        "options": asdict(options),
        "sources": resumable.digest(sources),
    }


def _report_collecting(done: int, total: int) -> None:
    print(f"answers {done} of {total}", file=sys.stderr, flush=True)
