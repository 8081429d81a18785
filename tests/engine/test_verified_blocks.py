"""SDAR and LLaDA2 verify their drafts in a second copy of the block: the answer is that of blocks of
one token, whatever was drafted."""

from functools import partial
from typing import Any

import pytest

from tests import tolerances
from tests.engine.drafts import DraftingReference, decided
from tests.engine.masked import Rule, Trajectory
from tests.engine.masked_requests import GetEngine, GetMade, generate, params_of, prompts_of
from tests.engine.test_masked import blocks_decided_alike

pytestmark = pytest.mark.numerics

ROOM = {"blocks_in_flight": 2}
FEW = [7, 40, 41, 300]  # of which some drafts stand
GREEDY, WARM = Rule("verified"), Rule("verified", temperature=0.5)


def as_decided(found: Trajectory, mask_id: int) -> Trajectory:
    return Trajectory(decided(found.steps, mask_id), found.tokens)


@pytest.mark.parametrize(
    ("family", "block_length", "rule", "allowed"),
    [
        pytest.param("SDAR", 4, GREEDY, FEW, id="SDAR"),
        pytest.param("SDAR", 4, WARM, None, id="SDAR, warm"),
        pytest.param("SDAR", 32, WARM, FEW, id="SDAR, long blocks"),
        pytest.param("MoE", 4, WARM, FEW, id="MoE", marks=pytest.mark.thorough),
        pytest.param("LLaDA2", 4, WARM, FEW, id="LLaDA2"),
        pytest.param("LLaDA2", 32, GREEDY, FEW, id="LLaDA2, long blocks"),
    ],
)
def test_decisions(
    engine: GetEngine,
    made: GetMade,
    family: str,
    block_length: int,
    rule: Rule,
    allowed: list[int] | None,
) -> None:
    """200 blocks of four tokens, or 40 of 32: drafts, what is revealed, answers."""
    checkpoint, plain = made(family, block_length)
    decode, max_tokens = DraftingReference(plain, allowed), 160 if block_length == 4 else 250
    prompts = prompts_of(block_length)
    options: dict[str, Any] = {} if allowed is None else {"allowed_token_ids": allowed}
    params = [params_of(rule, max_tokens, seed, **options) for seed in range(len(prompts))]
    found = generate(engine(checkpoint, ROOM, block_size=32), prompts, params)
    same = total = num_steps = 0
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        theirs = partial(decode.generate, prompt, max_tokens, rule, seed)
        same += blocks_decided_alike(as_decided(ours, decode.mask_id), theirs, decode)
        total += sum(step.finished for step in ours.steps)
        num_steps += len(ours.steps)
    print(f"{same} of {total} blocks, {num_steps} steps")
    assert same >= total * tolerances.DECIDED
    if allowed is not None:
        assert max_tokens * len(prompts) > 1.2 * num_steps / 2, "some drafts stand"
