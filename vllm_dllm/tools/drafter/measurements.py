"""Measures which block size yields most on each prompt, for a width predictor to learn.

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

from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import save_tensors
from vllm_dllm.tools.drafter.offline import replay
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target
from vllm_dllm.tools.drafter.sequences import complete

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
