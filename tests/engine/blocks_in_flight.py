"""Several blocks in flight, in plain Python: SDAR's published loop, of which a canvas is several
blocks, each of which sees those before it unfinished."""

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.engine.masked import Reference, Rule, Step, Trajectory


class Chosen(NamedTuple):
    """What a step reveals."""

    first: set[int]  # of the first block that has anything hidden
    later: set[int]


@dataclass
class Flight:
    trajectory: Trajectory = field(default_factory=Trajectory)
    num_ahead: int = 0  # tokens that were revealed while an earlier block was not finished


def fly(
    decode: Reference,
    blocks_in_flight: int,
    prompt: list[int],
    max_tokens: int,
    rule: Rule,
    seed: int = 0,
    stop: int | None = None,  # ends the answer; None: nothing but `max_tokens` does
    most: int | None = None,  # of the blocks reveal anything at a time; None: all
) -> Flight:
    """Decodes `blocks_in_flight` blocks at a time by confidence. A block behind an unfinished one
    reveals what is wrong a tenth as often. Nothing counts behind the answer's end."""
    B, flight = decode.block_length, Flight()
    C, found, known, end = B * blocks_in_flight, flight.trajectory, list(prompt), 0
    end = len(prompt) + max_tokens
    ahead = 1 - 0.1 * (1 - rule.threshold)
    while len(known) < end:
        start = len(known) // C * C
        canvas = known[start:] + [decode.mask_id] * (C - len(known) % C)
        first, step, edit_steps, finished = len(known) - start, 0, 0, False
        shown: set[int] = set()
        while not finished:
            counted = min(C, end - start, _behind_stop(canvas, shown, stop))
            tokens, probability, _, _ = decode._draw(known[:start], canvas, rule, seed, step)
            hidden = [i for i in range(first, counted) if i not in shown]
            chosen = _choose(hidden, probability, rule.threshold, ahead, B)
            if most is not None and hidden:
                near = (hidden[0] // B + most) * B
                chosen = chosen._replace(later={i for i in chosen.later if i < near})
            flight.num_ahead += len(chosen.later)
            revealed = chosen.first | chosen.later
            changed: set[int] = set()
            if rule.edit is not None:
                changed = {
                    i for i in shown if tokens[i] != canvas[i] and probability[i] > rule.edit
                }
                edit_steps += not hidden
            kept = shown - changed
            tokens = [
                canvas[i] if i < first or i in kept else token for i, token in enumerate(tokens)
            ]
            step, shown = step + 1, shown | revealed
            canvas = [tokens[i] if i < first or i in shown else decode.mask_id for i in range(C)]
            if rule.edit is None:
                finished = all(
                    i in shown
                    for i in range(first, min(C, end - start, _behind_stop(canvas, shown, stop)))
                )
            else:
                finished = not hidden and (not changed or edit_steps == rule.most_edit_steps)
            if finished:  # what nothing counts in is shown, too
                canvas = tokens
            flags = [int(i in shown) for i in range(first, C)]
            found.steps.append(Step(tokens[first:], flags, canvas[first:], finished))
        known = known[:start] + tokens
        if stop in known[len(prompt) :]:
            end = known.index(stop, len(prompt)) + 1
    found.tokens = known[len(prompt) : end]
    return flight


def _choose(
    hidden: list[int], probability: list[float], threshold: float, ahead: float, block_length: int
) -> Chosen:
    current = [i for i in hidden if i // block_length == hidden[0] // block_length]
    surest = max(current, key=lambda i: (probability[i], -i), default=None)
    first = {i for i in current if probability[i] > threshold or i == surest}
    later = {i for i in hidden if i not in current and probability[i] > ahead}
    return Chosen(first, later)


def _behind_stop(canvas: list[int], shown: set[int], stop: int | None) -> int:
    """The end of what counts."""
    return next((i + 1 for i in sorted(shown) if canvas[i] == stop), len(canvas))
