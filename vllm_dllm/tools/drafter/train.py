"""Trains a DFlash drafter for any causal language model: `vllm-dllm drafter train`.

The target answers the prompts once (`sequences.py`). Every step (`fit.py`) then runs the real
target over some of the sequences and takes the states of the chosen layers. It puts blocks after
random anchors (`blocks.py`) and lowers the loss of what the drafter guesses there. A stopped run
can be continued (`resumable.py`).
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import Qwen3Config

from vllm_dllm.drafters.layout import check_drafter
from vllm_dllm.errors import InputError
from vllm_dllm.tools import resumable
from vllm_dllm.tools.drafter import reference
from vllm_dllm.tools.drafter.fit import (
    STATE_FILE,
    UNFINISHED_STATE_FILE,
    TrainingOptions,
    fit,
)
from vllm_dllm.tools.drafter.reference import DFlashDrafter
from vllm_dllm.tools.drafter.sequences import (
    KnownSequence,
    collect_answers,
    complete,
    make_server_completer,
    read_buffer,
    read_prompts,
    room_for_prompts,
)
from vllm_dllm.tools.inputs import read_config, read_tokenizer

COMPLETIONS_FILE = "completions.jsonl"
# OUT does not keep these
WORKING_FILES = (COMPLETIONS_FILE, STATE_FILE, UNFINISHED_STATE_FILE)
LOG_FILE = "training_log.json"


def train(
    target: Path,
    out: Path,
    *,
    prompts: Path | None = None,
    server: str | None = None,
    from_buffer: Path | None = None,
    init_from: Path | None = None,
    device: str | None = None,  # None: a GPU if there is one
    **options: Any,
) -> None:
    """Trains a drafter, and writes it to `out`, which never exists unfinished. `options` are the
    fields of `TrainingOptions`. Raises InputError for input that cannot be used.

    Sequences come from `prompts`, which the target or the `server` answers. Or they come from the
    buffer of a serving drafter, which must be `init_from`.
    """
    settings = TrainingOptions(**options)
    resumable.check_out(out)
    _check_arguments(settings, prompts, server, from_buffer, init_from)
    text_config = read_config(target).get_text_config()
    start = reference.load_drafter(init_from) if init_from else None
    config = start.config if start else config_for_target(target, text_config, settings)
    name = str(init_from or "asked for")
    check_drafter(config.to_dict(), text_config.to_dict(), name, str(target))
    sequences: list[KnownSequence] = []
    questions: list[list[int]] = []
    if from_buffer:
        sequences = read_buffer(from_buffer, config.vocab_size)
    elif prompts:
        room = room_for_prompts(text_config.max_position_embeddings, settings.max_tokens)
        questions = read_prompts(prompts, target, room)
    identity = {
        "target": resumable.weight_marks(target),
        "init_from": resumable.weight_marks(init_from) if init_from else None,
        "server": server,
        "options": asdict(settings),
        "sources": resumable.digest(sequences or questions),
    }
    run = resumable.Run(out, identity, "target, other sequences or options", WORKING_FILES)
    if run.is_finished():
        return
    ask = make_server_completer(server, settings.max_tokens, config.vocab_size) if server else None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = reference.load_target(target, device)
    run.start()
    if questions:
        ask = ask or (lambda batch: complete(model, batch, settings.max_tokens))
        sequences = collect_answers(questions, ask, run.partial / COMPLETIONS_FILE)
    drafter = start or _new_drafter(config, settings.seed)
    log = fit(model, drafter.train().to(device), sequences, settings, run.partial)
    dflash: dict[str, Any] = config.dflash_config
    if start is None or "trained_context" in dflash:  # unknown for a published drafter
        longest = max(len(sequence.tokens) for sequence in sequences)
        dflash["trained_context"] = max(longest, dflash.get("trained_context", 0))
    reference.save_drafter(drafter, run.partial, torch.bfloat16)
    _save_log(log, run.partial)
    run.finish()


def _save_log(log: list[dict[str, Any]], folder: Path) -> None:
    """Writes the log of `fit` into `folder`, as JSON and as a plot."""
    (folder / LOG_FILE).write_text(json.dumps(log) + "\n")
    figure = Figure(figsize=(10, 4), layout="tight")
    left, right = figure.subplots(1, 2)
    steps = [entry["step"] for entry in log]
    left.plot(steps, [entry["loss"] for entry in log])
    left.set(xlabel="step", ylabel="weighted cross entropy (nats)")
    right.plot(steps, [entry["tau_held_out"] for entry in log])
    right.set(xlabel="step", ylabel="tokens per verification, held out")
    figure.savefig(folder / "training.png", dpi=80)


def _check_arguments(
    options: TrainingOptions,
    prompts: Path | None,
    server: str | None,
    from_buffer: Path | None,
    init_from: Path | None,
) -> None:
    """Raises InputError for options that contradict each other, or lack one that they need."""
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
    for name, number in (("--steps", options.steps), ("--layers", options.num_layers)):
        if number is not None and number < 1:
            raise InputError(f"{name} must be at least 1, got {number}")
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise InputError(f"--minutes must be a number greater than 0, got {options.minutes}")


def config_for_target(target: Path, text_config: Any, options: TrainingOptions) -> Qwen3Config:
    """Returns the configuration of a new drafter. Raises InputError if there is no token for
    masks, or a block is too small or longer than the target's context."""
    if not 2 <= options.block_size <= text_config.max_position_embeddings:
        raise InputError(
            f"--block-size must be from 2, an anchor and a mask, to the "
            f"{text_config.max_position_embeddings} tokens of the target's context, got "
            f"{options.block_size}"
        )
    tokenizer = read_tokenizer(target)
    mask_token = options.mask_token or tokenizer.mask_token
    if mask_token is None:
        raise InputError(
            "the target's tokenizer has no mask token: name one that is never written with "
            "--mask-token, such as an unused special token"
        )
    mask_token_id = tokenizer.get_vocab().get(mask_token)
    if mask_token_id is None:
        raise InputError(f"the target's vocabulary has no token {mask_token!r} for the mask")
    layer_ids = options.target_layer_ids
    return reference.make_drafter_config(
        text_config,
        num_layers=options.num_layers,
        target_layer_ids=spread_layers(text_config.num_hidden_layers, options.num_layers)
        if layer_ids is None
        else layer_ids,
        mask_token_id=mask_token_id,
        block_size=options.block_size,
    )


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Returns the indices of `count` layers of the target, evenly spread from the second to the
    third last, as in published drafters."""
    if count == 1:
        return (num_target_layers // 2,)
    first, last = 1, max(num_target_layers - 3, 1)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


@torch.no_grad()
def _new_drafter(config: Qwen3Config, seed: int) -> DFlashDrafter:
    """Returns a drafter with random weights. Matrices are normal, scaled by the number of their
    inputs, and norms are 1. Sets PyTorch's global seed."""
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return drafter
