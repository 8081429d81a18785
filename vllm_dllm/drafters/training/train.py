"""Trains a DFlash drafter for any causal language model: `vllm-dllm drafter train`.

The target answers the prompts once. Every step then runs the real target over some of those
sequences, takes the states of the chosen layers, puts blocks behind random anchors and lowers the
cross entropy of the tokens that the target wrote there. The first wrong guess ends a draft, so
tokens near the anchor weigh more: exp(-(k - 1) / γ), as in the paper (arXiv:2602.06036).

Everything is written to OUT.partial and renamed to OUT at the end. A run that finds its own
OUT.partial goes on where that stopped; steps draw their numbers from (seed, step), so that nothing
but weights and optimiser has to be kept.
"""

import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config

from vllm_dllm.checkpoint.muon import MuonAdamW
from vllm_dllm.drafters.training.blocks import KnownSequence, block_logits, make_blocks, pad
from vllm_dllm.drafters.training.collect import collect, complete, read_prompts, server_completer
from vllm_dllm.drafters.training.offline import mean_length, replay
from vllm_dllm.drafters.training.plots import save_plots
from vllm_dllm.drafters.training.read_buffer import read_buffer
from vllm_dllm.drafters.training.reference import (
    DFlashDrafter,
    DrafterError,
    drafter_config,
    load_drafter,
    save_drafter,
)
from vllm_dllm.drafters.training.target_states import (
    Target,
    check_fit,
    load_target,
    target_text_config,
)

# In OUT.partial only.
RUN_FILE = "run.json"
COMPLETIONS_FILE = "completions.jsonl"
STATE_FILE = "state.pt"

LOG_FILE = "training_log.json"
HELD_OUT_SHARE = 16  # one sequence in this many is held out, to see τ
MAX_HELD_OUT = 64
LOG_EVERY = 50  # steps
SAVE_EVERY_S = 60.0


@dataclass(frozen=True)
class Options:
    """What makes two runs the same run, next to the target and the sequences."""

    block_size: int = 16
    """Slots of a block: the anchor and the tokens drafted behind it."""
    num_layers: int = 3
    target_layer_ids: tuple[int, ...] | None = None
    """None: as many as the drafter has layers, spread as in the published drafters."""
    mask_token: str | None = None
    """A token that is never written; None: the tokenizer's mask token."""
    minutes: float | None = None
    steps: int | None = None
    """Exactly one of the two sets the length."""
    seed: int = 0
    max_tokens: int = 256
    """Longest answer."""
    blocks_per_sequence: int = 8
    """At most; each behind another anchor."""
    tokens_per_batch: int = 4096
    """Context and block slots of a step."""
    narrow_share: float = 0.25
    """Blocks narrower than block_size, so that short drafts are no strangers."""
    muon_lr: float = 5e-3
    adam_lr: float = 2e-3
    weight_decay: float = 0.05


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
    """Writes a drafter to `out`. Raises DrafterError for input that cannot be used; in no case does
    `out` come to exist unfinished.

    Sequences come from `prompts`, which the target or the `server` answers, or from the buffer of
    a serving drafter, which is `init_from` then.
    """
    _check_arguments(out, options, prompts, server, from_buffer, init_from)
    text_config = target_text_config(target_path)
    start = load_drafter(init_from) if init_from else None
    if start is None:
        config = _new_config(target_path, text_config, options)
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
    partial = out.with_name(out.name + ".partial")
    run = _fingerprint(target_path, init_from, server, options, sequences or questions)
    _check_resumed(partial, run)
    completer = server_completer(server, options.max_tokens, config.vocab_size) if server else None
    target = load_target(target_path, device)
    partial.mkdir(parents=True, exist_ok=True)
    (partial / RUN_FILE).write_text(json.dumps(run))
    if questions:
        sequences = collect(
            questions,
            completer or (lambda batch: complete(target, batch, options.max_tokens)),
            partial / COMPLETIONS_FILE,
            _report_collecting,
        )
        if not sequences:
            raise DrafterError(
                f"the target answers none of the {len(questions)} prompts with two tokens or more: "
                f"expected prompts it has something to say to"
            )
    torch.manual_seed(options.seed)
    drafter = DFlashDrafter(config)
    initialize(drafter)
    if start is not None:
        drafter.load_state_dict(start.state_dict())
    log = fit(target, drafter.to(device), sequences, options, partial)
    save_drafter(drafter, partial, torch.bfloat16)
    (partial / LOG_FILE).write_text(json.dumps(log) + "\n")
    save_plots(log, partial)
    for name in (RUN_FILE, COMPLETIONS_FILE, STATE_FILE):
        (partial / name).unlink(missing_ok=True)
    partial.rename(out)


def _check_arguments(
    out: Path,
    options: Options,
    prompts: Path | None,
    server: str | None,
    from_buffer: Path | None,
    init_from: Path | None,
) -> None:
    if out.exists():
        raise DrafterError(f"{out} exists already: remove it or name another folder")
    if (prompts is None) == (from_buffer is None):
        raise DrafterError("expected either --prompts FILE.jsonl or --from-buffer DIR")
    if server is not None and prompts is None:
        raise DrafterError("--server answers prompts: expected --prompts FILE.jsonl beside it")
    if from_buffer is not None and init_from is None:
        raise DrafterError(
            "--from-buffer goes on with the drafter that filled the buffer: name it with "
            "--init-from DRAFTER"
        )
    if (options.minutes is None) == (options.steps is None):
        raise DrafterError("expected either --minutes or --steps")


def _new_config(target_path: Path, text_config: Any, options: Options) -> Qwen3Config:
    layer_ids = options.target_layer_ids
    if layer_ids is None:
        layer_ids = spread_layers(text_config.num_hidden_layers, options.num_layers)
    if options.block_size < 2:
        raise DrafterError(
            f"expected a block of at least 2 slots, anchor and mask, got {options.block_size}"
        )
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    mask_token = options.mask_token or tokenizer.mask_token
    if mask_token is None:
        raise DrafterError(
            "the target's tokenizer has no mask token: name one that is never written with "
            "--mask-token, such as an unused special token"
        )
    mask_token_id = tokenizer.get_vocab().get(mask_token)
    if mask_token_id is None:
        raise DrafterError(f"the target's vocabulary has no token {mask_token!r} for the mask")
    config = drafter_config(
        text_config,
        num_layers=options.num_layers,
        target_layer_ids=layer_ids,
        mask_token_id=mask_token_id,
        block_size=options.block_size,
    )
    check_fit(config, text_config)
    return config


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Evenly from the second layer to the third last, as in the published drafters."""
    if count == 1:
        return (num_target_layers // 2,)
    first, last = 1, max(num_target_layers - 3, 1)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def _fingerprint(
    target: Path,
    init_from: Path | None,
    server: str | None,
    options: Options,
    sources: Sequence[Any],
) -> dict[str, Any]:
    def weights(folder: Path) -> list[list[Any]]:
        files = sorted(folder.glob("*.safetensors"))
        return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]

    # Through JSON and back, or tuples would differ from what was read.
    run = {
        "target": weights(target),
        "init_from": weights(init_from) if init_from else None,
        "server": server,
        "options": asdict(options),
        "sources": hashlib.sha256(repr(sources).encode()).hexdigest(),
    }
    return json.loads(json.dumps(run))


def _check_resumed(partial: Path, run: dict[str, Any]) -> None:
    if not partial.exists() or not any(partial.iterdir()):
        return
    run_file = partial / RUN_FILE
    if not run_file.exists() or json.loads(run_file.read_text()) != run:
        raise DrafterError(
            f"{partial} is left from a run with another target, other sequences or options: remove "
            f"it, or repeat that run to finish it"
        )


def _report_collecting(done: int, total: int) -> None:
    print(f"answers {done} of {total}", file=sys.stderr, flush=True)


@torch.no_grad()
def initialize(drafter: DFlashDrafter) -> None:
    """Fan-in scaled normal matrices; norms stay one."""
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)


def batches(
    sequences: list[KnownSequence], options: Options, num_blocks: int
) -> Iterator[list[KnownSequence]]:
    """Endless batches of about `tokens_per_batch` tokens, of like length; the same every time."""
    rng = random.Random(options.seed)
    while True:
        # Noise on the sort key lets sequences meet others every time.
        order = sorted(sequences, key=lambda s: len(s.tokens) + rng.uniform(0, 24))
        epoch: list[list[KnownSequence]] = []
        rows: list[KnownSequence] = []
        longest = 0
        for sequence in order:
            longest = max(longest, len(sequence.tokens))
            size = longest + num_blocks * options.block_size
            if rows and (len(rows) + 1) * size > options.tokens_per_batch:
                epoch.append(rows)
                rows, longest = [], len(sequence.tokens)
            rows.append(sequence)
        epoch.append(rows)
        rng.shuffle(epoch)
        yield from epoch


def draw_anchors(
    rows: list[KnownSequence], options: Options, step: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Anchors and widths [B][N] of a step; anchor -1 fills the rows that have fewer."""
    rng = random.Random(f"{options.seed} {step}")
    anchors: list[list[int]] = []
    for row in rows:
        choices = range(row.first_anchor, len(row.tokens) - 1)
        anchors.append(rng.sample(choices, min(len(choices), options.blocks_per_sequence)))
    num_blocks = max(map(len, anchors))
    anchors = [row + [-1] * (num_blocks - len(row)) for row in anchors]
    widths = [
        [
            rng.randint(2, options.block_size)
            if rng.random() < options.narrow_share
            else options.block_size
            for _ in row
        ]
        for row in anchors
    ]
    return anchors, widths


def drafting_loss(
    drafter: DFlashDrafter,
    target: Target,
    rows: list[KnownSequence],
    anchors: list[list[int]],
    widths: list[list[int]],
) -> tuple[Tensor, float]:
    """Weighted cross entropy of the masked slots, and the mean number of right guesses before the
    first wrong one."""
    device = target.device
    tokens = pad(rows, device)
    lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
    block_size = drafter.config.block_size
    blocks = make_blocks(
        tokens,
        lengths,
        torch.tensor(anchors, device=device),
        torch.tensor(widths, device=device),
        block_size,
        drafter.mask_token_id,
    )
    states, _ = target.states(tokens, drafter.target_layer_ids)
    logits = block_logits(drafter, target, states, blocks)
    slot = torch.arange(block_size, device=device).repeat(blocks.wanted.shape[1] // block_size)
    decay = block_size * 7 / 16  # γ: 7 for blocks of 16, as in the paper
    weight = torch.exp(-(slot - 1) / decay) * (blocks.wanted >= 0)
    losses = F.cross_entropy(
        logits.flatten(0, 1), blocks.wanted.flatten(), ignore_index=-1, reduction="none"
    )
    loss = (losses * weight.flatten()).sum() / weight.sum()
    right = (logits.detach().argmax(-1) == blocks.wanted).unflatten(1, (-1, block_size))
    is_block = (blocks.wanted >= 0).unflatten(1, (-1, block_size)).any(-1)
    counts = right[..., 1:].int().cumprod(-1).sum(-1)[is_block]
    return loss, counts.float().mean().item()


def learning_rate_scale(progress: float, warmup: float = 0.02) -> float:
    """Linear warm-up, constant, then linear to zero: `progress` runs from 0 to 1."""
    return min((progress + 1e-3) / warmup, 1.0) * min(1.0, (1.0 - progress) / 0.6)


def fit(
    target: Target,
    drafter: DFlashDrafter,
    sequences: list[KnownSequence],
    options: Options,
    partial: Path,
) -> list[dict[str, Any]]:
    """Trains in place; returns the log. Saves its state now and then, and when interrupted."""
    held_out = sequences[:: max(HELD_OUT_SHARE, len(sequences) // MAX_HELD_OUT)]
    learnt = [s for s in sequences if s not in held_out] or held_out
    optimizer = MuonAdamW(
        drafter,
        muon_lr=options.muon_lr,
        adam_lr=options.adam_lr,
        weight_decay=options.weight_decay,
    )
    step, elapsed, log = 0, 0.0, []
    state_file = partial / STATE_FILE
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        optimizer.load_state(state["optimizer"])
        step, elapsed, log = state["step"], state["elapsed_s"], state["log"]

    def save() -> None:
        state = {
            "drafter": drafter.state_dict(),
            "optimizer": optimizer.state(),
            "step": step,
            "elapsed_s": elapsed,
            "log": log,
        }
        unfinished = state_file.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(state_file)

    feed = batches(learnt, options, options.blocks_per_sequence)
    for _ in range(step):
        next(feed)
    clock = last_save = time.monotonic()
    losses: list[float] = []
    counts: list[float] = []
    while (progress := _progress(options, step, elapsed)) < 1:
        rows = next(feed)
        anchors, widths = draw_anchors(rows, options, step)
        loss, count = drafting_loss(drafter, target, rows, anchors, widths)
        loss.backward()
        optimizer.step(learning_rate_scale(progress))
        losses.append(loss.item())
        counts.append(count)
        step += 1
        now = time.monotonic()
        elapsed += now - clock
        clock = now
        if step % LOG_EVERY == 0:
            log.append(_log_entry(target, drafter, held_out, losses, counts, step, elapsed))
            _report(log[-1], options)
            losses.clear()
            counts.clear()
            # On the lines of the log: a resumed run averages the same steps.
            if now - last_save > SAVE_EVERY_S:
                save()
                last_save = now
    if losses:
        log.append(_log_entry(target, drafter, held_out, losses, counts, step, elapsed))
        _report(log[-1], options)
    return log


def _progress(options: Options, step: int, elapsed_s: float) -> float:
    if options.steps is not None:
        return step / options.steps
    assert options.minutes is not None
    return elapsed_s / (60 * options.minutes)


def _log_entry(
    target: Target,
    drafter: DFlashDrafter,
    held_out: list[KnownSequence],
    losses: list[float],
    counts: list[float],
    step: int,
    elapsed_s: float,
) -> dict[str, Any]:
    prompts = [s.tokens[: s.first_anchor] for s in held_out]
    answers = [s.tokens[s.first_anchor :] for s in held_out]
    draft_width = drafter.config.block_size - 1
    replayed = replay(target, drafter, prompts, answers, draft_width)
    return {
        "step": step,
        "loss": sum(losses) / len(losses),
        "right_before_wrong": sum(counts) / len(counts),
        "tau_held_out": mean_length([one.lengths(draft_width) for one in replayed]),
        "minutes": elapsed_s / 60,
    }


def _report(entry: dict[str, Any], options: Options) -> None:
    left = 1 / _progress(options, entry["step"], 60 * entry["minutes"]) - 1
    print(
        f"step {entry['step']} loss {entry['loss']:.4f} "
        f"right before wrong {entry['right_before_wrong']:.2f} "
        f"held-out τ {entry['tau_held_out']:.2f} ETA {entry['minutes'] * left:.1f} min",
        file=sys.stderr,
        flush=True,
    )
