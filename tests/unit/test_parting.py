"""The tests' own tools: what the comparison of trajectories takes for rounding is nothing else, and
the tests that `make test` tries are there."""

import re
from collections.abc import Callable

import pytest
import torch

from tests.engine.parting import Decisions, Grounds, Settings, first_parting, is_decided_by_rounding
from tests.features import TRIED
from tests.paths import ROOT

C, V = 3, 4
LITTLE, MUCH = 1e-6, 0.05
RIGHT = Decisions(best_guess=[0, 1, 2], accepted=[1, 1, 0], canvas=[0, 1, 3], finished=False)


def grounds(second: float, draw: float) -> Grounds:
    """Position 0 has token 3 `second` nats below its best; the draw of position 1 lies `draw` above
    the boundary of its tokens 0 and 1."""
    logits = torch.full((C, V), -9.0, dtype=torch.float64)
    logits[[0, 1, 2], [0, 1, 2]] = 0.0
    logits[0, 3] = -second
    log_probs = logits.log_softmax(-1)
    draws = torch.full((C,), 0.5, dtype=torch.float64)
    draws[1] = log_probs[1, 0].exp() + draw
    return Grounds(log_probs, draws)


def settings(of: Grounds, bound: float, mean: float) -> Settings:
    """With a bound and a threshold so far from what position 2 adds to and from the mean."""
    entropy = -(of.log_probs.exp() * of.log_probs).sum(-1)
    return Settings(float(entropy[1] + entropy[2]) + bound, float(entropy.mean()) + mean, 0.4)


# What ours decides otherwise, and what that goes by.
OTHERWISE: dict[str, tuple[Decisions, Callable[[float], Grounds]]] = {
    "best guess": (RIGHT._replace(best_guess=[3, 1, 2]), lambda far: grounds(far, MUCH)),
    "candidate": (RIGHT._replace(canvas=[0, 0, 3]), lambda far: grounds(MUCH, far)),
}


@pytest.mark.parametrize("case", OTHERWISE)
@pytest.mark.parametrize(("far", "expected"), [(LITTLE, True), (MUCH, False)])
def test_tokens(case: str, far: float, expected: bool) -> None:
    ours, of = OTHERWISE[case][0], OTHERWISE[case][1](far)
    assert is_decided_by_rounding(ours, RIGHT, of, settings(of, MUCH, MUCH)) == expected


@pytest.mark.parametrize(("far", "expected"), [(LITTLE, True), (MUCH, False)])
def test_sums_of_entropies(far: float, expected: bool) -> None:
    of = grounds(MUCH, MUCH)
    rejected = RIGHT._replace(accepted=[0, 1, 0], canvas=[2, 1, 3])
    assert is_decided_by_rounding(rejected, RIGHT, of, settings(of, far, MUCH)) == expected
    finished = RIGHT._replace(finished=True, canvas=RIGHT.best_guess)
    assert is_decided_by_rounding(finished, RIGHT, of, settings(of, MUCH, far)) == expected


def test_fresh_noise_is_never_off() -> None:
    of = grounds(LITTLE, LITTLE)
    noise = RIGHT._replace(canvas=[0, 1, 0])
    assert not is_decided_by_rounding(noise, RIGHT, of, settings(of, LITTLE, LITTLE))


def test_first_parting() -> None:
    other = RIGHT._replace(finished=True)
    assert first_parting([RIGHT, RIGHT], [RIGHT, RIGHT]) is None
    assert first_parting([RIGHT, other], [RIGHT, RIGHT]) == 1
    assert first_parting([RIGHT], [RIGHT, RIGHT]) == 1


@pytest.mark.parametrize("name", TRIED)
def test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    source = (ROOT / file).read_text()
    assert not function or re.search(rf"^def {function.partition('[')[0]}\(", source, re.MULTILINE)
