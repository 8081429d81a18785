"""Computes offline how many tokens every verification of speculative decoding would emit, and which
block size yields most on each prompt, for a width predictor to learn.

Greedy speculative decoding is lossless, so the tokens are those of the target alone, whatever the
drafter does. They are generated once. One forward of the target gives the states of all of them.
For one draft width, one pass of the drafter guesses a block after every token. What remains is to
walk from anchor to anchor, for each verify width.

A width counts drafted tokens: vLLM's `num_speculative_tokens`. The block has one slot more, the
anchor. τ is the mean number of tokens that a verification emits. The bonus token counts. Tokens
past EOS or `max_tokens` do not count. The first token of an answer comes from the prefill, not from
a verification.

A prompt's label is the size with the largest τ. Answers are only a few blocks long, so nine prompts
in ten have ties. A tie goes to the size that is best for all prompts together if it is among the
best, else to the smallest. If ties went to the smallest, a predictor that cannot tell prompts apart
would choose it for all of them. It would lose 2 to 18 % of τ on the other prompts (measured with a
half-trained drafter).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_dllm.drafters.layout import check_drafter
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import save_tensors
from vllm_dllm.tools.drafter.blocks import block_logits, make_blocks, pad_sequences
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target
from vllm_dllm.tools.drafter.sequences import KnownSequence, complete

ANCHORS_PER_FORWARD = 64  # of each sequence, in a forward of the drafter
ROWS_PER_FORWARD = 16  # sequences


@dataclass(frozen=True)
class Replayed:
    """A prompt's answer, and how many of its tokens a draft after each of its tokens guesses."""

    answer: list[int]
    first_logits: Tensor  # [V] fp32 on the CPU, from which the first token is chosen
    matches: list[int]
    """For each answer token but the last: the number of drafted tokens after it that are right, up
    to the first wrong one."""

    def emitted_lengths(self, verify_width: int) -> list[int]:
        """Returns the number of tokens that each verification emits, if it verifies the first
        `verify_width` drafted tokens."""
        lengths: list[int] = []
        anchor, last = 0, len(self.answer) - 1
        while anchor < last:
            emitted = min(min(self.matches[anchor], verify_width) + 1, last - anchor)
            lengths.append(emitted)
            anchor += emitted
        return lengths


@torch.no_grad()
def replay(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],  # the target's greedy tokens of each prompt, at least one
    draft_width: int,
) -> list[Replayed]:
    """Drafts `draft_width` tokens after every answer token but the last, and counts how many are
    right. Returns one result for each prompt, in their order. Raises InputError if the drafter does
    not fit the target."""
    check_drafter(drafter.config.to_dict(), target.config.to_dict(), "given", "given")
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    replayed: dict[int, Replayed] = {}
    for start in range(0, len(order), ROWS_PER_FORWARD):
        chosen = order[start : start + ROWS_PER_FORWARD]
        rows = [KnownSequence(prompts[i] + answers[i], len(prompts[i])) for i in chosen]
        replayed |= zip(chosen, _replay_rows(target, drafter, rows, draft_width), strict=True)
    return [replayed[i] for i in range(len(prompts))]


def _replay_rows(
    target: Target, drafter: DFlashDrafter, rows: list[KnownSequence], draft_width: int
) -> list[Replayed]:
    """Returns what `replay` returns, for sequences that fit into one forward of the target."""
    tokens = pad_sequences(rows, target.device)
    lengths = torch.tensor([len(row.tokens) for row in rows], device=target.device)
    first = torch.tensor([row.first_anchor for row in rows], device=target.device)
    states, logits = target.states(tokens, drafter.target_layer_ids)
    first_logits = logits[torch.arange(len(rows), device=target.device), first - 1].float().cpu()
    del logits
    matches: list[list[int]] = [[] for _ in rows]
    num_anchors = int((lengths - 1 - first).max())
    for start in range(0, num_anchors, ANCHORS_PER_FORWARD):
        end = min(start + ANCHORS_PER_FORWARD, num_anchors)
        anchors = first[:, None] + torch.arange(start, end, device=target.device)
        anchors = torch.where(anchors < lengths[:, None] - 1, anchors, -1)
        widths = torch.full_like(anchors, draft_width + 1)
        blocks = make_blocks(
            tokens, lengths, anchors, widths, draft_width + 1, drafter.mask_token_id
        )
        guesses = block_logits(drafter, target, states, blocks).argmax(-1)
        right = (guesses == blocks.wanted).unflatten(1, (-1, draft_width + 1))[..., 1:]
        counts = right.int().cumprod(-1).sum(-1).tolist()
        for row, (row_anchors, row_counts) in enumerate(zip(anchors.tolist(), counts, strict=True)):
            matches[row] += [n for a, n in zip(row_anchors, row_counts, strict=True) if a >= 0]
    answers = [row.tokens[row.first_anchor :] for row in rows]
    return list(map(Replayed, answers, first_logits, matches))


def mean_length(lengths: Sequence[Sequence[int]]) -> float:
    """Returns τ, the mean length over all verifications of all prompts, from the lengths of each
    prompt. Returns 1, as without drafts, if there are no verifications."""
    num_verifications = sum(map(len, lengths))
    return sum(map(sum, lengths)) / num_verifications if num_verifications else 1.0


PROMPTS_PER_PART = 32
_TIE = 1e-9  # values of τ that differ by less are equal: sums in another order


@dataclass(frozen=True)
class Measurements:
    """Measurements of n prompts at S block sizes. Indexing selects prompts by a tensor of rows."""

    logits: Tensor  # [n, V] fp32, the target's at the last prompt position
    emitted: Tensor  # [n, S] int64, tokens that all verifications of the answer emit
    verifications: Tensor  # [n, S] int64, number of verifications

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, rows: Tensor) -> "Measurements":
        return Measurements(self.logits[rows], self.emitted[rows], self.verifications[rows])

    @property
    def tau(self) -> Tensor:
        """[n, S] fp64: emitted tokens per verification."""
        return self.emitted.double() / self.verifications

    @property
    def best_fixed(self) -> int:
        """The index of the size with the largest mean τ over the prompts."""
        return int(self.tau.mean(0).argmax())

    @property
    def smallest_best(self) -> Tensor:
        """[n] int64: the index of the smallest among each prompt's best sizes. Sizes ascend."""
        return self._is_best().int().argmax(-1)

    def labels(self, best_fixed: int) -> Tensor:
        """Returns [n] int64: the index of each prompt's best size. A tie goes to the size
        `best_fixed` if it is among the best, else to the smallest."""
        is_best = self._is_best()
        return torch.where(is_best[:, best_fixed], best_fixed, is_best.int().argmax(-1))

    def _is_best(self) -> Tensor:
        """Returns [n, S] bool: the sizes with each prompt's largest τ."""
        tau = self.tau
        return tau >= tau.amax(-1, keepdim=True) - _TIE


def candidate_sizes(trained_block_size: int, radius: int) -> tuple[int, ...]:
    """Returns the block sizes to try, ascending: the size that the drafter was trained with, and
    the `radius` sizes below it, but none below 2. Raises InputError if `radius` is below 1."""
    if radius < 1:
        raise InputError(f"--radius must be at least 1, got {radius}")
    return tuple(range(max(2, trained_block_size - radius), trained_block_size + 1))


def measure(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[list[int]],
    sizes: Sequence[int],
    max_tokens: int,
) -> Measurements:
    """Returns the measurements of the prompts. Prompts whose answer is a single token are left out,
    since nothing is drafted for them. `max_tokens` is the most tokens of an answer."""
    answers = complete(target, prompts, max_tokens)
    courses = [replay(target, drafter, prompts, answers, size - 1) for size in sizes]
    lengths = [
        [course[i].emitted_lengths(size - 1) for course, size in zip(courses, sizes, strict=True)]
        for i in range(len(prompts))
    ]
    drafted = [i for i, answer in enumerate(answers) if len(answer) > 1]
    vocab_size = drafter.config.vocab_size
    return Measurements(
        torch.stack([courses[0][i].first_logits for i in drafted])
        if drafted
        else torch.zeros(0, vocab_size),
        torch.tensor([[sum(row) for row in lengths[i]] for i in drafted]).view(-1, len(sizes)),
        torch.tensor([[len(row) for row in lengths[i]] for i in drafted]).view(-1, len(sizes)),
    )


def measure_in_parts(
    measure_part: Callable[[Sequence[list[int]]], Measurements],
    prompts: Sequence[list[int]],
    folder: Path,
    advance: Callable[[int], None],
) -> Measurements:
    """Returns the measurements of all prompts. A part is written to the folder when it is complete,
    and read from there if a stopped run has written it. Calls `advance` with the number of prompts
    of each part."""
    parts: list[Measurements] = []
    for start in range(0, len(prompts), PROMPTS_PER_PART):
        part = prompts[start : start + PROMPTS_PER_PART]
        file = folder / f"part-{start // PROMPTS_PER_PART:05d}.safetensors"
        if not file.exists():
            save_tensors(vars(measure_part(part)), file)
        parts.append(Measurements(**load_file(file)))
        advance(len(part))
    return Measurements(
        *(torch.cat([getattr(part, field) for part in parts]) for field in vars(parts[0]))
    )


def split_prompts(
    prompts: Sequence[list[int]], held_out_share: float, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the training and the held-out prompts, in random order by `seed`. Equal prompts count
    once, so that no prompt is on both sides. Raises InputError if there are too few prompts."""
    different = [json.loads(text) for text in dict.fromkeys(map(json.dumps, prompts))]
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed)).tolist()
    num_held_out = round(len(different) * held_out_share)
    if min(num_held_out, len(different) - num_held_out) < 2:
        raise InputError(
            f"expected enough prompts for training and for a held-out share of {held_out_share}, "
            f"got {len(different)} different ones"
        )
    chosen = [different[i] for i in order]
    return chosen[num_held_out:], chosen[:num_held_out]
