"""LLaDA2.2's published loop, one block after the other: the definition of right for models whose
blocks delete and insert. Of modeling_llada2_moe.py's `_joint_decode_block`, in plain Python.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from tests.engine.masked import Reference, Rule, Step, Trajectory, uniform
from tests.unit.denoise.test_masked import published
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.row_stats import sample_by_inversion


class Drawing(NamedTuple):
    """What a step draws a block by."""

    logits: torch.Tensor  # [B, V]
    temperature: float
    candidates: torch.Tensor  # [B] float64 in [0, 1)
    escapes: list[float]  # in [0, 1): five places, and five tokens

    def propose(self, hidden: list[int]) -> tuple[list[int], list[float]]:
        """Drawn where something is hidden, else the most probable ones; and how probable they are,
        which the temperature does not change."""
        tokens = self.logits.argmax(-1)
        if self.temperature:
            probs = (self.logits / self.temperature).softmax(-1)
            tokens[hidden] = sample_by_inversion(probs, self.candidates)[hidden]
        probability = self.logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tokens.tolist(), probability.tolist()

    def one_of_others(self, i: int, excluded: list[int], is_hidden: bool, draw: float) -> int:
        row = self.logits[i].clone()
        row[excluded] = -torch.inf
        if not self.temperature or not is_hidden:
            return int(row.argmax())
        probs = (row / self.temperature).softmax(-1)[None]
        return int(sample_by_inversion(probs, torch.tensor([draw], dtype=torch.float64)))


class LevenshteinReference(Reference):
    def __init__(self, model: nn.Module, block_length: int, mask_id: int) -> None:
        super().__init__(model, block_length, mask_id)
        config = model.config  # its small model's
        self.delete, self.split = config.delete_token_id, config.split_token_id
        self.happened: Counter[str] = Counter()
        """What the loop did, so that a test can tell that it is about something."""

    def generate(self, prompt: list[int], max_tokens: int, rule: Rule, seed: int = 0) -> Trajectory:
        B, found, known = self.block_length, Trajectory(), list(prompt)
        while len(known) < len(prompt) + max_tokens:
            known += self._block(known, rule, seed, found.steps)
            assert len(known) % B == 0
        found.tokens = known[len(prompt) :][:max_tokens]
        return found

    def _block(self, known: list[int], rule: Rule, seed: int, steps: list[Step]) -> list[int]:
        B, mask = self.block_length, self.mask_id
        start, num_steps = len(known) // B * B, rule.num_steps or B
        first = len(known) - start
        block = known[start:] + [mask] * (B - first)
        original, post, seen = [i >= first for i in range(B)], 0, set()
        for step in range(1000):
            old = list(block)
            hidden = [i for i in range(first, B) if old[i] == mask]
            num_original = sum(original[i] for i in hidden)
            post = 0 if num_original else post + 1
            drawing = Drawing(
                self.logits(known[:start] + old)[start:],
                rule.temperature,
                uniform(seed, start, B, step, noise.CANDIDATE),
                uniform(seed, len(known), 10, step, noise.ESCAPE).tolist(),
            )
            tokens, probability = drawing.propose(hidden)
            least = (B - first) // num_steps + (step < (B - first) % num_steps)
            least += len(hidden) - num_original
            shown = published(rule.name, hidden, probability, [], least, rule.threshold, rule.bound)
            if step >= num_steps:
                shown = set(hidden)
            changed = {
                i
                for i in set(range(first, B)) - set(hidden)
                if probability[i] > rule.edit and tokens[i] != old[i]
            }
            is_last = post >= rule.most_edit_steps
            if is_last:
                self.happened["last"] += 1
                shown = set(hidden)
                moves = [self.delete, self.split]
                for i in shown | changed:
                    if tokens[i] in moves:
                        draw = float(drawing.candidates[i])
                        tokens[i] = drawing.one_of_others(i, moves, i in shown, draw)
            for i in shown | changed:
                block[i] = tokens[i]
            if not is_last and (shown or changed):
                self._escape(block, old, seen, drawing, shown)
            seen.add(tuple(block))
            block, original = self._moved(block, old, original, first)
            is_full = mask not in block[first:]
            finished = is_full and (block == old or post + 1 > rule.most_edit_steps)
            revealed = [int(token != mask) for token in block[first:]]
            steps.append(Step(block[first:], revealed, block[first:], finished))
            if finished:
                return block[first:]
        raise AssertionError("the loop warns, and leaves masks")

    def _moved(
        self, block: list[int], old: list[int], original: list[bool], first: int
    ) -> tuple[list[int], list[bool]]:
        B, tokens, kept = self.block_length, block[:first], original[:first]
        for i in range(first, B):
            if block[i] == self.delete:
                self.happened["deleted"] += 1
            elif block[i] == self.split:
                self.happened["inserted"] += 1
                tokens += [self.mask_id, old[i]]
                kept += [False, original[i]]
            else:
                tokens.append(block[i])
                kept.append(original[i])
        missing = B - len(tokens)
        return (tokens + [self.mask_id] * missing)[:B], (kept + [False] * missing)[:B]

    def _escape(
        self,
        block: list[int],
        old: list[int],
        seen: set[tuple[int, ...]],
        drawing: Drawing,
        shown: set[int],
    ) -> None:
        """Changes `block`, until it is another one than the steps before have made."""
        for turn in range(5):
            places = [i for i in range(len(block)) if block[i] != old[i]]
            if tuple(block) not in seen or not places:
                return
            self.happened["escaped"] += 1
            i = places[int(drawing.escapes[turn] * len(places))]
            draw = drawing.escapes[5 + turn]
            block[i] = drawing.one_of_others(i, [block[i]], i in shown, draw)
