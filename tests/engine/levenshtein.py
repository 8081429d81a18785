"""LLaDA2.2's published loop, one block after the other: the definition of right for models whose
blocks delete and insert. Of modeling_llada2_moe.py's `_joint_decode_block`, in plain Python.
"""

from collections import Counter

import torch
from torch import nn

from tests.engine.masked import Reference, Rule, Step, Trajectory
from tests.unit.denoise.test_masked import published
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.row_stats import sample_by_inversion


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
            logits = self.logits(known[:start] + old)[start:]
            tokens, probability = self._candidates(len(known), logits, hidden, rule, seed, step)
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
                for i in shown | changed:
                    if tokens[i] in (self.delete, self.split):
                        out = [self.delete, self.split]
                        tokens[i] = self._without(
                            len(known), logits, i, out, i in shown, rule, seed, step
                        )
            for i in shown | changed:
                block[i] = tokens[i]
            if not is_last and (shown or changed):
                self._escape(block, old, seen, len(known), logits, shown, rule, seed, step)
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
        begin: int,
        logits: torch.Tensor,
        shown: set[int],
        rule: Rule,
        seed: int,
        step: int,
    ) -> None:
        """Changes `block`, until it is another one than the steps before have made."""
        draw = self._uniform(seed, begin, 10, step, noise.ESCAPE).tolist()
        for turn in range(5):
            places = [i for i in range(len(block)) if block[i] != old[i]]
            if tuple(block) not in seen or not places:
                return
            self.happened["escaped"] += 1
            i = places[int(draw[turn] * len(places))]
            uniform = draw[5 + turn]
            block[i] = self._draw_one(logits[i], [block[i]], i in shown, rule, uniform)

    def _candidates(
        self, begin: int, logits: torch.Tensor, hidden: list[int], rule: Rule, seed: int, step: int
    ) -> tuple[list[int], list[float]]:
        """Drawn where something is hidden, else the most probable ones; and how probable they are,
        which the temperature does not change."""
        B = len(logits)
        tokens = logits.argmax(-1)
        if rule.temperature:
            draw = self._of_block(begin, B, seed, step)
            drawn = sample_by_inversion((logits / rule.temperature).softmax(-1), draw)
            tokens[hidden] = drawn[hidden]
        probability = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tokens.tolist(), probability.tolist()

    def _without(
        self,
        begin: int,
        logits: torch.Tensor,
        i: int,
        excluded: list[int],
        is_hidden: bool,
        rule: Rule,
        seed: int,
        step: int,
    ) -> int:
        draw = float(self._of_block(begin, len(logits), seed, step)[i])
        return self._draw_one(logits[i], excluded, is_hidden, rule, draw)

    def _draw_one(
        self, row: torch.Tensor, excluded: list[int], is_hidden: bool, rule: Rule, draw: float
    ) -> int:
        row = row.clone()
        row[excluded] = -torch.inf
        if not rule.temperature or not is_hidden:
            return int(row.argmax())
        probs = (row / rule.temperature).softmax(-1)[None]
        return int(sample_by_inversion(probs, torch.tensor([draw], dtype=torch.float64)))

    def _of_block(self, begin: int, length: int, seed: int, step: int) -> torch.Tensor:
        """[length] float64, by which a block's candidates are drawn."""
        start = begin // self.block_length * self.block_length
        return self._uniform(seed, start, length, step, noise.CANDIDATE)

    def _uniform(self, seed: int, start: int, length: int, step: int, stream: int) -> torch.Tensor:
        positions = torch.arange(start, start + length)[None]
        keys = noise.keys_from_seeds(torch.tensor([seed]))
        return noise.uniform(keys, positions, torch.tensor([step]), stream)[0]
