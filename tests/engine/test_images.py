"""Prompts with images and videos equal transformers' DiffusionGemma: in one step, committed, as
whole trajectories, whatever the batch and the caches do."""

import math
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from checkpoints.recipes.images.seeing import save_seeing, start_seeing
from checkpoints.recipes.images.tasks import IMAGE_TASKS, generate_image
from checkpoints.recipes.tiny import IMAGE_TOKENS
from checkpoints.recipes.tokenizer import IMAGE_ID, VIDEO_ID, build_tokenizer
from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import Engine, GetEngine, GetTiny, cached_tokens, preemptions, tokens_of
from tests.engine.images import random_image, random_prompt, random_prompt_with_videos, random_video
from tests.engine.one_step import (
    CACHED,
    CHUNK,
    FEW_STEPS,
    PREFILLS,
    Prompt,
    assert_equal,
    assert_equal_to_reference,
    first_steps,
    random_ids,
    read_one_step,
)
from tests.engine.rounding import assert_same, decided
from tests.engine.test_trajectories import TRACED, parted, served_trajectories
from tests.paths import CHECKPOINTS
from vllm_dllm.scheduling.scheduler import CanvasAsyncScheduler

pytestmark = pytest.mark.numerics

CANVAS = 32


def prompts_with_images(path: Path, window: int) -> list[Prompt]:
    """0 to 3 images at any place; texts around the window's length and the steps' ends."""
    parts = [
        [5],
        [0, 1],
        [1, 0],
        [window - 1, 2],
        [window, 3],
        [window + 1, 0, 4],
        [CHUNK - 2, 3],
        [CHUNK, 1, 40],
        [0, 0, 0, 9],
        [3 * window, 7, 3 * window, 2],
    ]
    return [random_prompt(path, part, seed=i) for i, part in enumerate(parts)]


def prompts_with_videos(path: Path, window: int) -> list[Prompt]:
    """Videos at any place, alone and in company; texts around the window's length and the steps'
    ends."""
    parts: list[list[int | str]] = [
        ["2 frames"],
        [0, "1 frames", 1],
        [window - 1, "3 frames", 2],
        [window, "2 frames", "2 frames", window + 1],
        [CHUNK - 2, "2 frames", 3],
        [5, "image", "2 frames", 40, "image", 2],
        [3 * window, "5 frames", 7],
    ]
    return [random_prompt_with_videos(path, part, seed=i) for i, part in enumerate(parts)]


class Asked(NamedTuple):
    prompts: list[Prompt]
    canvases: list[list[int]]
    expected: list[torch.Tensor]  # transformers' first step


@pytest.fixture(scope="module")
def asked(seeing: GetTiny) -> Callable[[int], Asked]:
    """By the window."""

    @cache
    def get(window: int) -> Asked:
        path = seeing(window)
        pictures, videos = prompts_with_images(path, window), prompts_with_videos(path, window)
        # Of videos not from 0: with 4, a token of the fifth is at a tie of two experts, where the
        # reference moves by 2 when its pixels move by a millionth.
        seeds = (*range(len(pictures)), *range(20, 20 + len(videos)))
        prompts, canvases = pictures + videos, [random_ids(CANVAS, 512, seed) for seed in seeds]
        return Asked(prompts, canvases, first_steps(reference.load(path), prompts, canvases))

    return get


@pytest.mark.parametrize(
    ("window", "setting"),
    [
        *((16, setting) for setting in PREFILLS),
        (64, "both"),
        *(
            pytest.param(64, name, marks=pytest.mark.thorough)
            for name in PREFILLS
            if name != "both"
        ),
    ],
)
def test_one_step(
    engine: GetEngine, seeing: GetTiny, asked: Callable[[int], Asked], window: int, setting: str
) -> None:
    path, (prompts, canvases, expected) = seeing(window), asked(window)
    served = engine(path, **PREFILLS[setting])
    for prompt, canvas, right in zip(prompts, canvases, expected, strict=True):  # each alone
        assert_equal([right], read_one_step(served, [prompt], [canvas]))
    neighbours: list[Prompt] = [random_ids(40 + 100 * i, 497, seed=100 + i) for i in range(3)]
    neighbours.append(random_prompt(path, [20, 30], seed=7))
    neighbours.append(random_prompt_with_videos(path, [20, "2 frames", 30], seed=7))
    is_cached = served.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    read = read_one_step(served, prompts, canvases, neighbours, from_cache=is_cached)
    assert_equal(expected, read)


def test_images_that_are_not_scaled(
    engine: GetEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The small model that sees takes pictures as they are: nine or twelve tokens, no others."""
    torch.manual_seed(0)
    path, tokenizer = tmp_path_factory.mktemp("unscaled"), build_tokenizer()
    text = CHECKPOINTS / "diffusiongemma-tiny"
    save_seeing(start_seeing(len(tokenizer), text), tokenizer, path)
    served, model = engine(path, **PREFILLS["plain"]), reference.load(path)
    rng = random.Random(0)
    prompts, canvases = [], []
    for seed, task in enumerate(IMAGE_TASKS):
        picture = generate_image(rng, task, held_out=False).picture.image
        tokens = [*range(20, 25), IMAGE_ID, *range(30, 40)]
        prompts.append(reference.Seen.prepare(path, tokens, [picture]))
        canvases.append(random_ids(64, 512, seed=seed))
    assert [len(prompt) for prompt in prompts] == [15 + 2 + count for count in (9, 12, 12, 9)]
    assert_equal_to_reference(model, prompts, canvases, read_one_step(served, prompts, canvases))
    odd: list[tuple[Any, str]] = [
        (random_image(size, seed=1), r"multiples of 8 pixels.*got") for size in [(25, 24), (80, 80)]
    ]
    for number in (math.nan, math.inf, 1e30):  # what such an image left in the cache stayed there
        dark = np.full((24, 24, 3), number, dtype=np.float32)
        odd.append((dark, "colours, from 0 to 255, got "))
    for image, error in odd:
        prompt = {"prompt_token_ids": [IMAGE_ID], "multi_modal_data": {"image": [image]}}
        with pytest.raises(VLLMValidationError, match=error):
            served.ask([prompt], SamplingParams())


def test_images_without_a_place(engine: GetEngine, seeing: GetTiny) -> None:
    images = [random_image((48, 48), seed=seed) for seed in range(2)]
    odd = {"prompt_token_ids": [IMAGE_ID], "multi_modal_data": {"image": images}}
    with pytest.raises(ValueError, match=r"no place for image 2 of 2\. Write a"):
        engine(seeing(16), **PREFILLS["prefix-caching"]).ask([odd], SamplingParams())


def test_the_encoder_cache_is_bounded(engine: GetEngine, seeing: GetTiny) -> None:
    """A step's tokens bound what is kept of images, however many requests have some."""
    path, options = seeing(64), {"limit_mm_per_prompt": {"video": 0}}  # one takes more
    served = engine(path, **PREFILLS["chunked-prefill"], **options)
    model = reference.load(path)
    prompts = [random_prompt(path, [3, 2, 5], seed=i) for i in range(20, 32)]
    canvases = [random_ids(CANVAS, 512, seed=i) for i in range(len(prompts))]
    read = read_one_step(served, prompts, canvases)
    assert_equal_to_reference(model, prompts, canvases, read)
    kept = served.runner.encoder_cache.encoder_outputs.values()
    assert 0 < sum(len(output) for output in kept) <= max(CHUNK, IMAGE_TOKENS)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_cache_hits_are_by_what_is_shown(engine: GetEngine, seeing: GetTiny, kind: str) -> None:
    """Not by its place, its tokens or the name that a client gives; and by when a frame is shown.
    No hit ends in an image."""
    path = seeing(16)
    served, model = engine(path, **PREFILLS["prefix-caching"]), reference.load(path)
    assert served.llm.reset_prefix_cache()
    mark = IMAGE_ID if kind == "image" else VIDEO_ID
    text, tail = random_ids(40, 490, seed=1), random_ids(100, 490, seed=2)
    tokens = [*(token + 7 for token in text), mark, *(token + 7 for token in tail)]

    def seen(tokens: list[int], what: Any) -> reference.Seen:
        images, videos = ([what], []) if kind == "image" else ([], [what])
        return reference.Seen.prepare(path, tokens, images, videos)

    if kind == "image":
        shown: list[Any] = [random_image((64, 64), seed) for seed in (1, 2)]
    else:
        frames, metadata = random_video(3, (64, 64), seed=1)
        other = random_video(3, (64, 64), seed=2)[0]
        shown = [(frames, metadata), (frames, metadata | {"fps": 5.0}), (other, metadata)]
    one, *others = (seen(tokens, what) for what in shown)

    def hits(prompt: reference.Seen) -> int:
        return cached_tokens(served, prompt.engine_input | {"multi_modal_uuids": {kind: ["name"]}})

    before, whole = 32, len(one) // 32 * 32
    assert [hits(one), hits(one)] == [0, whole]
    for other in others:
        assert [hits(other), hits(other)] == [before, whole]
    # The same with another text behind it: no block that holds both is found. The first two of a
    # video's frames fill three blocks and a half.
    fork = seen([*tokens[:50], 9, 9], shown[0])
    assert hits(fork) in ((before, 96) if kind == "image" else range(before, whole, 32))
    canvas = random_ids(CANVAS, 512, seed=3)
    for prompt in (one, *others, fork):
        read = read_one_step(served, [prompt], [canvas], from_cache=True)
        assert_equal_to_reference(model, [prompt], [canvas], read)


def test_most_frames_of_a_long_video(engine: GetEngine, seeing: GetTiny) -> None:
    """32, evenly taken, in parts of 96 tokens: more than one step, and the encoder's whole cache.
    Another request, which is at its own video, waits for its turn."""
    path = seeing(16)
    served = engine(path, **PREFILLS["both"], max_model_len=4096)
    model = reference.load(path)
    frames, metadata = random_video(70, (64, 64), seed=1)
    kept = [i * 70 // 32 for i in range(32)]
    taken = metadata | {"frames_indices": [metadata["frames_indices"][i] for i in kept]}
    prompt = reference.Seen.prepare(path, [9, VIDEO_ID, 8], [], [(frames[kept], taken)])
    assert len(prompt) > 32 * 64
    sent = reference.Seen(prompt.tokens, [], prompt.inputs, [(frames, metadata)])
    other = random_prompt_with_videos(path, [5, "3 frames", 5], seed=3)
    canvases = [random_ids(CANVAS, 512, seed=i) for i in range(3)]
    prompts = [sent, other, sent]
    assert_equal_to_reference(model, prompts, canvases, read_one_step(served, prompts, canvases))


def test_next_turn_reuses_an_answer_about_an_image(engine: GetEngine, seeing: GetTiny) -> None:
    """The keys and values of the image and of the committed blocks behind it are a prefill's."""
    path = seeing(16)
    served, model = engine(path, **CACHED), reference.load(path)
    first = random_prompt(path, [10, 12], seed=3)
    params = SamplingParams(max_tokens=128, ignore_eos=True, extra_args=FEW_STEPS)
    answer = tokens_of(*served.ask([first], params))
    # Between the turns comes another image.
    tokens = [*first.tokens, *answer, IMAGE_ID, *random_ids(5, 500, seed=9)]
    images = [*first.images, random_image((50, 20), 9)]
    turn = reference.Seen.prepare(path, tokens, images)
    canvas = random_ids(CANVAS, 512, seed=8)
    reused = read_one_step(served, [turn], [canvas], from_cache=True)
    assert served.llm.reset_prefix_cache()
    prefilled = read_one_step(served, [turn], [canvas])
    for read in (reused, prefilled):
        assert_equal_to_reference(model, [turn], [canvas], read)
    for at_one, at_other in zip(reused[0], prefilled[0], strict=True):
        for token in at_one.keys() & at_other.keys():
            assert abs(at_one[token] - at_other[token]) <= 2 * tolerances.LOGPROB


@pytest.mark.parametrize(
    ("num_images", "num_videos", "steps"),
    [(20, 8, 1), (3, 2, 2), pytest.param(100, 20, 1, marks=pytest.mark.thorough)],
)
def test_whole_trajectories(
    engine: GetEngine, seeing: GetTiny, num_images: int, num_videos: int, steps: int
) -> None:
    """Two blocks, the first of which is committed behind what is seen. A random model is chaotic, a
    rounding error grows tenfold a step: few prompts for two steps a block."""
    path = seeing(16)
    served, model = engine(path, **TRACED), reference.load(path)
    model.generation_config.max_denoising_steps = steps
    parts = [[i % 7, *[i % 5] * (1 + i % 3)] for i in range(num_images)]
    prompts = [random_prompt(path, part, seed=i) for i, part in enumerate(parts)]
    prompts += [
        random_prompt_with_videos(path, [i % 7, f"{1 + i % 3} frames", i % 5], seed=i)
        for i in range(num_videos)
    ]
    lengths = [2 * CANVAS] * len(prompts)
    ours = served_trajectories(served, prompts, lengths, diffusion_max_steps=steps)
    num_parted = 0
    for seed, (prompt, trajectory) in enumerate(zip(prompts, ours, strict=True)):
        again = partial(reference.generate_with_noise, model, prompt, seed, 2 * CANVAS)
        expected = again()
        assert trajectory.block_lengths == expected.block_lengths == [steps, steps]
        num_parted += parted(model, trajectory, expected, again)
    assert num_parted <= tolerances.PARTED * len(prompts)


def test_preempted_prompts_come_back_and_see_the_same(engine: GetEngine, seeing: GetTiny) -> None:
    path = seeing(64)
    prompts = [random_prompt(path, [10, 5], seed=i) for i in range(4)]
    prompts += [random_prompt_with_videos(path, [10, "2 frames", 5], seed=i) for i in range(4)]
    options = {"enable_prefix_caching": False, "disable_log_stats": False}
    roomy = engine(path, **options)
    expected = answers(roomy, prompts)
    assert preemptions(roomy) == 0
    narrow = engine(path, num_gpu_blocks_override=40, block_size=32, max_model_len=288, **options)
    found = answers(narrow, prompts)
    assert preemptions(narrow) > 0
    assert found == expected


def answers(served: Engine, prompts: list[Prompt]) -> list[list[int]]:
    """Of three blocks; a random model is chaotic: one step each."""
    params = [
        SamplingParams(
            max_tokens=3 * CANVAS, ignore_eos=True, seed=seed, extra_args={"diffusion_max_steps": 1}
        )
        for seed in range(len(prompts))
    ]
    return list(map(tokens_of, served.ask(prompts, params)))


def test_asynchronous_scheduling(engine: GetEngine, seeing: GetTiny, asynchronous: None) -> None:
    """Steps that compute an image, or wait to, are planned before the last one's end is known."""
    path, options = seeing(64), PREFILLS["chunked-prefill"]
    prompts = prompts_with_images(path, 64)
    waiting = engine(path, async_scheduling=False, **options)
    expected = decided(waiting.llm, lambda: answers(waiting, prompts))
    ahead = engine(path, async_scheduling=True, **options)
    assert isinstance(ahead.scheduler, CanvasAsyncScheduler)
    assert_same(answers(ahead, prompts), expected)


def test_two_processes_see_as_one(
    engine: GetEngine, seeing: GetTiny, two_processes: dict[str, int]
) -> None:
    """Each has the whole tower, and a part of the text layers. Some steps have no canvas."""
    path, options = seeing(16), PREFILLS["chunked-prefill"]
    prompts = prompts_with_images(path, 16)
    one = engine(path, **options)
    expected = decided(one.llm, lambda: answers(one, prompts))
    two = engine(path, **two_processes, **options)
    assert_same(answers(two, prompts), expected)
    canvases = [random_ids(CANVAS, 512, seed=i) for i in range(len(prompts))]
    read = read_one_step(two, prompts, canvases)
    assert_equal_to_reference(reference.load(path), prompts, canvases, read)


def test_an_engine_without_images_has_no_tower(engine: GetEngine, seeing: GetTiny) -> None:
    path = seeing(64)
    served = engine(path, limit_mm_per_prompt={"image": 0})
    names = [name for name, _ in served.runner.model.named_parameters()]
    assert names and not any("vision" in name for name in names)
    assert served.runner.encoder_cache is None
    with pytest.raises(ValueError, match="text-only models"):
        served.ask([random_prompt(path, [1, 1], seed=1)], SamplingParams())
    assert cached_tokens(served, [9] * 5) == 0  # text is served
