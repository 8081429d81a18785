"""A vocabulary that is read tile by tile: the answers, in a form and free, do not depend on the
tiles, nor on their company, nor on how many processes share it."""

import random
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import RequestOutput, SamplingParams

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import Engine, GetEngine, preemptions, tokens_of
from tests.engine.one_step import is_best_guess, random_ids
from tests.engine.rounding import assert_same, decided
from tests.engine.test_grammars import of
from tests.engine.workers import WATCHED_WORKERS
from tests.unit.grammar.canvases import SCHEMAS

pytestmark = pytest.mark.numerics

V, C = 40_960, 32
OPTIONS = {
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 256,
    "max_num_seqs": 16,
}
# Room for a block of each request of `KINDS`, not for two of each of `ALL`.
FEW_BLOCKS = {"num_gpu_blocks_override": 53, "block_size": 32, "disable_log_stats": False}
# Of each kind: streamed, and such as take whole rows of logits, side by side.
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"top_k": 5, "min_p": 0.01},
    {"temperature": 0.0},
    {"presence_penalty": 1.5, "logit_bias": {77: 20.0}},
    {"extra_args": {"diffusion_canvas_length": 20}},
]
ALL = [
    *KINDS,
    {"structured_outputs": of(json=SCHEMAS["order"])},
    {"structured_outputs": of(json=SCHEMAS["list of people"]), "top_k": 9},
    {"structured_outputs": of(regex="([a-z]+ ){12}end")},
    {"structured_outputs": of(json_object=True), "presence_penalty": 1.0},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large-vocabulary")
    return make_tiny_checkpoint(path, vocab_size=V, canvas_length=C)


def params_of(kind: dict[str, Any], seed: int, max_tokens: int) -> SamplingParams:
    # Random weights are chaotic: a last bit of difference shows after a few steps.
    extra = {"diffusion_max_steps": 2, **kind.get("extra_args", {})}
    options = {**kind, "extra_args": extra, "ignore_eos": "structured_outputs" not in kind}
    if not options["ignore_eos"]:
        max_tokens = 2 * C  # some forms need more than one block
    return SamplingParams(max_tokens=max_tokens, seed=seed, **options)


Answer = tuple[list[int], list[list[int]]]
"""Tokens, and the canvases on the way to them."""
first = itemgetter(0)


def decode(
    engine: Engine, kinds: list[dict[str, Any]] = KINDS, max_tokens: int = C
) -> list[Answer]:
    """Answers to requests of these kinds, in one batch."""
    params = [params_of(kind, seed, max_tokens) for seed, kind in enumerate(kinds)]
    prompts = [random_ids(9 + i, V, i) for i in range(len(kinds))]
    return answers_of(engine, engine.ask(prompts, params))


def answers_of(engine: Engine, outputs: list[RequestOutput]) -> list[Answer]:
    return list(zip(map(tokens_of, outputs), engine.canvases(outputs), strict=True))


@pytest.fixture(scope="module")
def usual(checkpoint: Path, engine: GetEngine) -> list[Answer | None]:
    served = engine(checkpoint, **OPTIONS)
    return decided(served.llm, lambda: decode(served))


@pytest.fixture(scope="module")
def long(checkpoint: Path, engine: GetEngine) -> list[Answer | None]:
    """To `ALL`, of two blocks."""
    served = engine(checkpoint, **OPTIONS)
    return decided(served.llm, lambda: decode(served, ALL, 2 * C), first)


def test_best_guesses_are_the_references(checkpoint: Path, engine: GetEngine) -> None:
    served = engine(checkpoint, **OPTIONS)
    prompts = [random_ids(length, V, length) for length in (5, 40)]
    canvases = [random_ids(C, V, 100 + i) for i in range(2)]
    params = [
        SamplingParams(
            max_tokens=C,
            extra_args={"diffusion_seed_canvas": canvas, "diffusion_max_steps": 1},
            ignore_eos=True,
        )
        for canvas in canvases
    ]
    outputs = served.ask(prompts, params)
    model = reference.load(checkpoint)
    for prompt, canvas, output in zip(prompts, canvases, outputs, strict=True):
        expected = reference.first_step_logprobs(model, prompt, canvas)
        assert all(map(is_best_guess, output.outputs[0].token_ids, expected))
        (step,) = served.steps(output.request_id)
        # The last of one step is at t_min + (t_max - t_min) / 1, the schedule's start.
        entropy = torch.distributions.Categorical(logits=expected / 0.8).entropy().mean()
        assert step["entropy"] == pytest.approx(entropy.item(), rel=0, abs=tolerances.LOGPROB / 0.8)


@pytest.mark.parametrize("batch_size", [4, pytest.param(16, marks=pytest.mark.thorough)])
def test_a_seed_gives_the_same_canvases_in_any_batch(
    checkpoint: Path, engine: GetEngine, batch_size: int
) -> None:
    served = engine(checkpoint, **OPTIONS)
    generator = random.Random(batch_size)
    own = [params_of(kind, seed, 2 * C) for seed, kind in enumerate(ALL)]
    prompt = random_ids(11, V, 1)
    alone = decided(
        served.llm, lambda: answers_of(served, [served.ask([prompt], params)[0] for params in own])
    )
    together = []
    for params in own:
        prompts, batch = [prompt], [params]
        for i in range(batch_size - 1):
            length = generator.randrange(1, 60)
            prompts.append(random_ids(length, V, generator.randrange(99)))
            batch.append(params_of(generator.choice(KINDS), i, generator.choice([5, C, 2 * C])))
        where = generator.randrange(batch_size)
        for column in (prompts, batch):
            column[0], column[where] = column[where], column[0]
        together.append(served.ask(prompts, batch)[where])
    answers = answers_of(served, together)
    assert_same(answers, alone)
    assert len(set(map(str, answers))) == len(own)


def test_small_tiles(
    checkpoint: Path, engine: GetEngine, usual: list[Answer | None], long: list[Answer | None]
) -> None:
    """Nor on a tolerance that is next to nothing, nor on preemptions."""
    settings = {"sampling_memory_mib": 1, "self_conditioning_tolerance": 1e-7}
    small = engine(checkpoint, settings=settings, **OPTIONS, **FEW_BLOCKS)
    assert_same(decode(small), usual)
    assert preemptions(small) == 0
    assert_same(decode(small, ALL, 2 * C), long, first)
    assert preemptions(small) > 0


def test_two_processes_share_the_vocabulary(
    checkpoint: Path,
    engine: GetEngine,
    long: list[Answer | None],
    asynchronous: None,
    two_processes: dict[str, int],
) -> None:
    """With all that may come between: both walk the same paths, asynchronously, and preempted."""
    options = {**OPTIONS, **FEW_BLOCKS, **two_processes, **WATCHED_WORKERS}
    served = engine(checkpoint, async_scheduling=True, **options)
    served.llm.collective_rpc("watch_grammars")
    assert_same(decode(served, ALL, 2 * C), long, first)
    assert preemptions(served) > 0
    one, other = served.llm.collective_rpc("grammar_paths")
    assert len(one) > len(ALL) - len(KINDS) and one == other
