"""Verified drafts of models whose rows predict their own positions (S2D2, arXiv 2603.25702), in
plain Python: what SDAR and LLaDA2 answer to `diffusion_acceptance` "verified".

Each position is verified in a forward of its own, which ends with the position's mask, so there is
neither a cache nor a second copy to be wrong about.
"""

import torch

from tests.engine.masked import Placed, Reference, Rule, Step, Trajectory, uniform, until_stop
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.row_stats import sample_by_inversion

UNKNOWN = -1  # a token that no step has decided


class DraftingReference(Reference):
    def __init__(self, plain: Reference, allowed: list[int] | None = None) -> None:
        super().__init__(plain.model, plain.block_length, plain.mask_id)
        self.allowed = allowed

    def next_logits(self, known: list[int]) -> torch.Tensor:
        """[V] of the token behind the known ones, in blocks of one token behind whole blocks whose
        tokens see each other."""
        inside = len(known) % self.block_length
        return self.logits([*known, self.mask_id], num_causal=inside + 1)[-1]

    def one_by_one(self, prompt: list[int], max_tokens: int, rule: Rule, seed: int) -> list[int]:
        """The answer in blocks of one token."""
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens:
            known += draw(self.next_logits(known)[None], len(known), rule, seed)
        return known[len(prompt) :]

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        rule: Rule,
        seed: int = 0,
        stops: frozenset[int] = frozenset(),
        max_model_len: int | None = None,
    ) -> Trajectory:
        """Drafts and verifies in turn, up to the answer's end. Where the context has no room for
        the next block, nothing is drafted."""
        B, mask, found = self.block_length, self.mask_id, Trajectory()
        end = len(prompt) + max_tokens
        end = end if max_model_len is None else min(end, max_model_len)
        known = list(prompt)
        while len(known) < end and stops.isdisjoint(known[len(prompt) :]):
            start, first = len(known) // B * B, len(known) % B
            stop = B if max_model_len is None else min(B, max_model_len - start)
            has_room = max_model_len is None or start + 2 * B <= max_model_len
            block, own, step = known[start:], len(known), 0
            placed: dict[int, Placed] = {}
            while True:
                hidden = range(len(block), min(stop, end - start))
                shown = [int(i < len(block)) for i in range(first, stop)]
                draft = [UNKNOWN] * (stop - len(block))
                if has_room:  # a draft sees a whole block of masks
                    rows = self.logits(known[:start] + block + [mask] * len(draft))[start:]
                    draft = draw(rows, start, rule, seed)[len(block) :]
                if has_room or step == 0:
                    tokens = block[first:] + draft
                    found.steps.append(Step(tokens, shown, tokens, False))
                    step += 1
                for i in hidden:
                    logits = self.next_logits(known[:start] + block)
                    (token,) = draw(logits[None], start + i, rule, seed)
                    block.append(token)
                    logprobs = (logits / (rule.temperature or 1.0)).log_softmax(-1)
                    placed[i] = Placed(step + 1, logprobs)
                    if token != draft[i - hidden.start]:
                        break
                step += 1
                over = len(block) == hidden.stop or not stops.isdisjoint(block[first:])
                tail = [UNKNOWN] * (stop - len(block))
                shown = [int(i < len(block)) for i in range(first, stop)]
                tokens = block[first:] + tail
                found.steps.append(Step(tokens, shown, tokens, over))
                if over:
                    break
            known = known[:start] + block
            found.placed += [placed[i] for i in range(first, len(block))]
            assert len(known) > own
        found.tokens = until_stop(known[len(prompt) :], stops)
        return found


def draw(logits: torch.Tensor, start: int, rule: Rule, seed: int) -> list[int]:
    """A token for each row of `logits` [n, V], by the number of its position from `start` on."""
    if not rule.temperature:
        return logits.argmax(-1).tolist()
    draw = uniform(seed, start, len(logits), 0, noise.CANDIDATE)
    return sample_by_inversion((logits / rule.temperature).softmax(-1), draw).tolist()


def decided(steps: list[Step], mask_id: int) -> list[Step]:
    """The steps without tokens that they have not decided: what verifications found behind the
    first difference."""

    def known(step: Step) -> Step:
        is_open = [
            not shown and (step.finished or token == mask_id)
            for shown, token in zip(step.revealed, step.canvas, strict=True)
        ]
        tokens, canvas = (
            [UNKNOWN if out else token for out, token in zip(is_open, row, strict=True)]
            for row in (step.tokens, step.canvas)
        )
        return step._replace(tokens=tokens, canvas=canvas)

    return [known(step) for step in steps]
