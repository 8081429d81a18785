"""Fast-dLLM v2's published loop (`generate` of the checkpoints' modeling.py), over transformers'
Qwen2 and random weights: the definition of right.

One difference: it forgets a prompt of exactly one block, which is read here like any other.

Each forward computes the whole sequence under a mask, so there is no cache to be wrong about.
"""

import torch

from tests.engine.masked import Placed, Rule, Step
from tests.engine.nemotron import Drawn, FirstTokenReference, FirstTokenTrajectory
from tests.unit.denoise.test_masked import published
from vllm_dllm.denoise import noise

SUB_BLOCK = 8


class ShiftedReference(FirstTokenReference):
    def one_by_one(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The greedy answer in blocks of one token, behind whole blocks whose tokens see each
        other: what verified drafts answer, too."""
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens:
            inside = len(known) % self.block_length
            known.append(int(self.logits(known, num_causal=inside)[-1].argmax()))
        return known[len(prompt) :]

    def block_logits(
        self, known: list[int], block: list[int], *, is_causal: bool = False
    ) -> torch.Tensor:
        """[B, V] fp32: of each position, by the row before it. If `is_causal`, the block's rows see
        no later ones."""
        logits = self.logits(known + block, num_causal=len(block) if is_causal else 0)
        first = len(known)
        # Before the first token there is none, and nothing is hidden there.
        return torch.cat((logits[max(first - 1, 0)][None], logits[first:-1]))

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
        is_verified = rule.name == "verified"
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens and stops.isdisjoint(known[len(prompt) :]):
            start = len(known) // B * B
            own, shown = len(known) - start, set[int]()  # the block's first token of the answer
            block, placed = known[start:], dict[int, Placed]()
            if not block:
                logits = self.logits(known)[-1]
                block, shown = [int(logits.argmax())], {0}
                placed[0] = Placed(0, (logits / (rule.temperature or 1.0)).log_softmax(-1))
            block += [self.mask_id] * (B - len(block))
            step, finished = 0, False
            while not finished:
                is_draft = is_verified and step % 2 == 1
                logits = self.block_logits(known[:start], block, is_causal=is_draft)
                noise_step = 0 if is_verified else step
                drawn = self._draw_rows(logits, start, rule, seed, noise_step, noise.CANDIDATE)
                hidden = [i for i in range(own, B) if i not in shown]
                least = B // num_steps + (step < B % num_steps)
                chosen: set[int] = set()
                if is_draft:
                    other = [i for i in hidden if drawn.tokens[i] != block[i]]
                    chosen = {i for i in hidden if i <= (other or [B])[0]}
                elif not is_verified:
                    chosen = published(
                        rule.name,
                        in_order_of_sub_blocks(hidden, least),
                        drawn.probability,
                        [],
                        least,
                        rule.threshold,
                        rule.bound,
                    )
                placed |= {i: Placed(step + 1, drawn.logprobs[i]) for i in chosen}
                shown |= chosen
                tokens = [drawn.tokens[i] if i in hidden else block[i] for i in range(B)]
                stays = range(B) if is_verified and not is_draft else (shown | {*range(own)})
                block = [tokens[i] if i in stays else self.mask_id for i in range(B)]
                over = [i for i in sorted(shown) if block[i] in stops]
                finished = shown.issuperset(range(own, over[0] if over else B))
                block = tokens if finished else block
                step += 1
                revealed = [int(i in shown) for i in range(own, B)]
                found.steps.append(Step(tokens[own:], revealed, block[own:], finished))
                found.drawn.append(Drawn(*(column[own:] for column in drawn)))
            known = known[:start] + block
            found.place(placed, range(own, B))
        found.end(known[len(prompt) :][:max_tokens], stops)
        return found

    def _draw_rows(
        self, logits: torch.Tensor, start: int, rule: Rule, seed: int, step: int, stream: int
    ) -> Drawn:
        """A candidate is as probable as the temperature makes it."""
        drawn = super()._draw_rows(logits, start, rule, seed, step, stream)
        probs = (logits / (rule.temperature or 1.0)).softmax(-1)
        probability = probs.gather(-1, torch.tensor(drawn.tokens)[:, None])[:, 0]
        return drawn._replace(probability=probability.tolist())


def in_order_of_sub_blocks(hidden: list[int], least: int) -> list[int]:
    """The hidden positions of the first sub-block that has any, and of as many more as it takes to
    reveal `least`."""
    found: list[int] = []
    for first in range(0, hidden[-1] + 1, SUB_BLOCK) if hidden else ():
        if len(found) < least:
            found += [i for i in hidden if first <= i < first + SUB_BLOCK]
    return found
