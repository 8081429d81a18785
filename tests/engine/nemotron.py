"""Nemotron-Labs-Diffusion's published loop (`generate` of modeling_nemotron_labs_diffusion.py, with
`causal_context`), over transformers' Ministral 3 and random weights: the definition of right.

Each forward computes the whole sequence under a mask, so there is no cache to be wrong about.
"""

from pathlib import Path

import torch

from tests.engine.masked import Reference, Rule, Step, Trajectory, make_checkpoint
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.row_stats import sample_by_inversion

ARCHITECTURE = "NemotronLabsDiffusionModel"


def make_nemotron_checkpoint(path: Path, block_length: int) -> tuple[Path, "SeededReference"]:
    path, made = make_checkpoint(path, block_length, ARCHITECTURE)
    return path, SeededReference(made.model, made.block_length, made.mask_id)


def transferred(hidden: list[int], probability: list[float], least: int, rule: Rule) -> set[int]:
    """The positions that a step reveals: all at the threshold, and the `least` surest."""
    if rule.name == "sequential":
        return set(hidden[:least])
    surest = sorted(hidden, key=lambda i: -probability[i])[:least]
    at_threshold = {i for i in hidden if probability[i] >= rule.threshold}
    return set(surest) | (at_threshold if rule.name == "dynamic" else set())


class SeededReference(Reference):
    @torch.inference_mode()
    def seeded_logits(self, known: list[int], block: list[int]) -> torch.Tensor:
        """[T, V] fp32: of known tokens, which are causal, and a block that sees all."""
        position = torch.arange(len(known) + len(block))
        seen = (position[:, None] >= position) | (position[:, None] >= len(known))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        ids = torch.tensor([known + block])
        return self.model(input_ids=ids, attention_mask=mask[None, None]).logits[0]

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        rule: Rule,
        seed: int = 0,
        stops: frozenset[int] = frozenset(),
    ) -> Trajectory:
        """Whole blocks, the last one cut off, at a stop token at the latest."""
        B, found = self.block_length, Trajectory()
        num_steps = rule.num_steps or B
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens and stops.isdisjoint(known[len(prompt) :]):
            logits = self.seeded_logits(known, [])[-1:]
            (first,), _ = self._draws(logits, len(known), rule, seed, 0, noise.INITIAL)
            block, shown, step, finished = [first] + [self.mask_id] * (B - 1), {0}, 0, False
            while not finished:
                logits = self.seeded_logits(known, block)[len(known) :]
                tokens, probability = self._draws(
                    logits, len(known), rule, seed, step, noise.CANDIDATE
                )
                hidden = [i for i in range(B) if i not in shown]
                least = B // num_steps + (step < B % num_steps)
                shown = shown | transferred(hidden, probability, least, rule)
                tokens = [tokens[i] if i in hidden else block[i] for i in range(B)]
                block = [tokens[i] if i in shown else self.mask_id for i in range(B)]
                over = [i for i in range(B) if i in shown and block[i] in stops]
                finished = shown.issuperset(range(over[0] if over else B))
                block = tokens if finished else block
                step += 1
                revealed = [int(i in shown) for i in range(B)]
                found.steps.append(Step(tokens, revealed, block, finished))
            known += block
        found.tokens = known[len(prompt) :][:max_tokens]
        for i, token in enumerate(found.tokens):
            if token in stops:
                found.tokens = found.tokens[: i + 1]
                break
        return found

    def _draws(
        self, logits: torch.Tensor, start: int, rule: Rule, seed: int, step: int, stream: int
    ) -> tuple[list[int], list[float]]:
        """Candidates of rows [L, V] that begin at `start`, and their probabilities, which the
        temperature does not change."""
        tokens = logits.argmax(-1)
        if rule.temperature:
            positions = torch.arange(start, start + len(logits))[None]
            key = noise.keys(torch.tensor([seed]))
            draw = noise.uniform(key, positions, torch.tensor([step]), stream)[0]
            tokens = sample_by_inversion((logits / rule.temperature).softmax(-1), draw)
        probability = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tokens.tolist(), probability.tolist()
