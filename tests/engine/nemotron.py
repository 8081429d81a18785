"""Nemotron-Labs-Diffusion's published loop (`generate` of modeling_nemotron_labs_diffusion.py, with
`causal_context`), over transformers' Ministral 3 and random weights: the definition of right.

Each forward computes the whole sequence under a mask, so there is no cache to be wrong about.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tests import tolerances
from tests.engine.masked import Placed, Reference, Rule, Step, Trajectory, uniform, until_stop
from tests.engine.parting import first_parting
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.row_stats import sample_by_inversion


def transferred(hidden: list[int], probability: list[float], least: int, rule: Rule) -> set[int]:
    """The positions that a step reveals: all at the threshold, and the `least` surest."""
    if rule.name == "sequential":
        return set(hidden[:least])
    surest = sorted(hidden, key=lambda i: -probability[i])[:least]
    at_threshold = {i for i in hidden if probability[i] >= rule.threshold}
    return set(surest) | (at_threshold if rule.name == "dynamic" else set())


class Drawn(NamedTuple):
    """Candidates of L rows, and what they were drawn by."""

    tokens: list[int]
    probability: list[float]
    cumulative: torch.Tensor  # [L, V], at the rule's temperature
    draw: torch.Tensor  # [L] float64 in [0, 1)
    logprobs: torch.Tensor  # [L, V], at the rule's temperature

    def is_between(self, row: int, one: int, other: int, temperature: float) -> bool:
        """Whether a draw is on the boundary between two tokens, so that rounding decides."""
        first, last = sorted((one, other))
        off = (self.cumulative[row, first:last] - self.draw[row]).abs().max()
        return temperature > 0 and bool(off <= tolerances.DECISION / temperature)


@dataclass
class FirstTokenTrajectory(Trajectory):
    drawn: list[Drawn] = field(default_factory=list)
    """Of each step; a block's first row is its seed's."""

    def place(self, placed: dict[int, Placed], positions: Iterable[int]) -> None:
        """A block's. Behind a token that ends the answer, nothing need have been revealed."""
        self.placed += [placed.get(i, placed[min(placed)]) for i in positions]

    def end(self, tokens: list[int], stops: frozenset[int]) -> None:
        """The answer: the blocks' tokens, up to the first that stops it."""
        self.tokens = until_stop(tokens, stops)

    def decided_steps(self, ours: Trajectory, temperature: float) -> int:
        """Steps up to which `ours` decides as this does. They may part where rounding decides."""
        step = first_parting(ours.steps, self.steps)
        if step is None:
            assert ours.tokens == self.tokens
            return len(self.steps)
        pairs = zip(self.steps[step].tokens, ours.steps[step].tokens, strict=True)
        parted = [(i, *pair) for i, pair in enumerate(pairs) if len(set(pair)) > 1]
        assert parted, f"step {step}"
        for each in parted:
            assert self.drawn[step].is_between(*each, temperature), f"step {step}, {each}"
        return step


class FirstTokenReference(Reference):
    @torch.inference_mode()
    def seeded_logits(self, known: list[int], block: list[int]) -> torch.Tensor:
        """[T, V] fp32: of known tokens, which are causal, and a block that sees all."""
        position = torch.arange(len(known) + len(block))
        seen = (position[:, None] >= position) | (position[:, None] >= len(known))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        ids = torch.tensor([known + block])
        found = self.model(input_ids=ids, attention_mask=mask[None, None]).logits[0]
        return self.only_allowed(found)

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        rule: Rule,
        seed: int = 0,
        stops: frozenset[int] = frozenset(),
    ) -> FirstTokenTrajectory:
        """Whole blocks, the last one cut off, at a stop token at the latest."""
        B, found = self.block_length, FirstTokenTrajectory()
        num_steps = rule.num_steps or B
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens and stops.isdisjoint(known[len(prompt) :]):
            logits = self.seeded_logits(known, [])[-1:]
            first = self._draw_rows(logits, len(known), rule, seed, 0, noise.INITIAL)
            block, shown, step, finished = first.tokens + [self.mask_id] * (B - 1), {0}, 0, False
            placed = {0: Placed(0, first.logprobs[0])}
            while not finished:
                logits = self.seeded_logits(known, block)[len(known) :]
                drawn = self._draw_rows(logits, len(known), rule, seed, step, noise.CANDIDATE)
                drawn.cumulative[0], drawn.draw[0] = first.cumulative[0], first.draw[0]
                hidden = [i for i in range(B) if i not in shown]
                least = B // num_steps + (step < B % num_steps)
                chosen = transferred(hidden, drawn.probability, least, rule)
                placed |= {i: Placed(step + 1, drawn.logprobs[i]) for i in chosen}
                shown = shown | chosen
                tokens = [drawn.tokens[i] if i in hidden else block[i] for i in range(B)]
                block = [tokens[i] if i in shown else self.mask_id for i in range(B)]
                over = [i for i in range(B) if i in shown and block[i] in stops]
                finished = shown.issuperset(range(over[0] if over else B))
                block = tokens if finished else block
                step += 1
                revealed = [int(i in shown) for i in range(B)]
                found.steps.append(Step(tokens, revealed, block, finished))
                found.drawn.append(drawn)
            known += block
            found.place(placed, range(B))
        found.end(known[len(prompt) :][:max_tokens], stops)
        return found

    def _draw_rows(
        self, logits: torch.Tensor, start: int, rule: Rule, seed: int, step: int, stream: int
    ) -> Drawn:
        """Of rows [L, V] that begin at `start`. The temperature changes no probability."""
        draw = uniform(seed, start, len(logits), step, stream)
        scaled = logits / (rule.temperature or 1.0)
        probs = scaled.softmax(-1)
        tokens = sample_by_inversion(probs, draw) if rule.temperature else logits.argmax(-1)
        probability = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        cumulative, logprobs = probs.double().cumsum(-1), scaled.log_softmax(-1)
        return Drawn(tokens.tolist(), probability.tolist(), cumulative, draw, logprobs)
