"""Nemotron-Labs-Diffusion's other two loops (`ar_generate` and `linear_spec_generate` of
modeling_nemotron_labs_diffusion.py), over transformers' Ministral 3: the definition of right.

Each forward computes the whole sequence under a mask, so there is no cache to be wrong about.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.engine.masked import Rule, until_stop
from tests.engine.nemotron import Drawn, FirstTokenReference
from vllm_dllm.denoise import noise


@dataclass
class Written:
    """An answer, token by token."""

    tokens: list[int] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    """Of one row each."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """[V] each, without rules."""

    def decided_tokens(self, found: list[int], temperature: float) -> int:
        """Tokens up to which `found` is the same. It may part where rounding decides."""
        for i, (token, ours) in enumerate(zip(self.tokens, found, strict=True)):
            if token != ours:
                assert self.drawn[i].is_between(0, token, ours, temperature), f"token {i}"
                return i
        return len(found)


@dataclass
class Speculated:
    tokens: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    """Each with the known token that it begins with."""
    accepted: list[int] = field(default_factory=list)
    """Tokens of each draft that are the answer's, with that one."""
    drawn: list[Drawn] = field(default_factory=list)
    """By which they were drafted."""

    def decided_drafts(self, found: list[list[int]], temperature: float) -> int:
        """Drafts up to which `found` is the same, see `Written.decided_tokens`."""
        for step, (draft, ours) in enumerate(zip(self.drafts, found, strict=False)):
            parted = [i for i, token in enumerate(draft) if token != ours[i]]
            for i in parted:
                assert self.drawn[step].is_between(i, draft[i], ours[i], temperature), step
            if parted:
                return step
        assert len(found) >= len(self.drafts)
        return len(self.drafts)


Rules = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""What a request's parameters make of logits [V] behind the tokens of its answer so far."""


class VerifiedReference(FirstTokenReference):
    def _follow(self, known: list[int], count: int, rule: Rule, seed: int) -> list[Drawn]:
        """What is drawn behind each of the last `count` known tokens, of one row each."""
        logits = self.seeded_logits(known, [])[-count:]
        first = len(known) - count + 1
        return [
            self._draw_rows(row[None], first + i, rule, seed, 0, noise.INITIAL)
            for i, row in enumerate(logits)
        ]

    def autoregressive(
        self,
        prompt: list[int],
        max_tokens: int,
        rule: Rule,
        seed: int = 0,
        stops: frozenset[int] = frozenset(),
        rules: Rules = lambda logits, answer: logits,
    ) -> Written:
        found = Written()
        while len(found.tokens) < max_tokens and stops.isdisjoint(found.tokens):
            known = prompt + found.tokens
            found.logits.append(self.seeded_logits(known, [])[-1])
            row = rules(found.logits[-1], found.tokens)[None]
            drawn = self._draw_rows(row, len(known), rule, seed, 0, noise.INITIAL)
            found.tokens += drawn.tokens
            found.drawn.append(drawn)
        return found

    def self_speculation(
        self,
        prompt: list[int],
        max_tokens: int,
        rule: Rule,
        seed: int = 0,
        stops: frozenset[int] = frozenset(),
    ) -> Speculated:
        """Both forwards of a draft draw a position by the same number; the published loop draws
        anew."""
        B, found = self.block_length, Speculated()
        (first,) = self._follow(prompt, 1, rule, seed)
        answer = list(first.tokens)
        while len(answer) < max_tokens and stops.isdisjoint(answer):
            known = prompt + answer[:-1]
            logits = self.seeded_logits(known, answer[-1:] + [self.mask_id] * (B - 1))[-B:]
            drawn = self._draw_rows(logits, len(known), rule, seed, 0, noise.INITIAL)
            draft = answer[-1:] + drawn.tokens[1:]
            behind = [row.tokens[0] for row in self._follow(known + draft, B, rule, seed)]
            accepted = 1
            while accepted < B and behind[accepted - 1] == draft[accepted]:
                accepted += 1
            answer += behind[:accepted]
            found.drafts.append(draft)
            found.drawn.append(drawn)
            found.accepted.append(accepted)
        found.tokens = until_stop(answer[:max_tokens], stops)
        return found
