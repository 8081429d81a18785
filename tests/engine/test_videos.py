"""Prompts with videos equal transformers' DiffusionGemma, whose processor makes timed frames of
them: in one step, committed, as whole trajectories, whatever the batch and the caches do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from checkpoints.recipes.tokenizer import IMAGE_ID, VIDEO_ID
from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import Engine, preemptions
from tests.engine.images import random_prompt_with_videos, random_video
from tests.engine.one_step import (
    CACHED,
    CHUNK,
    FEW_STEPS,
    PREFILLS,
    Prompt,
    assert_equal_to_reference,
    engine_input,
    random_ids,
    read_one_step,
)
from tests.engine.test_images import CANVAS, seeing  # noqa: F401 (a fixture)
from tests.engine.test_trajectories import TRACED, parted, served_trajectories
from vllm_dllm.step.model_state import DiffusionModelState

pytestmark = pytest.mark.numerics


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


@pytest.mark.parametrize(
    ("window", "setting"),
    [
        *((16, setting) for setting in PREFILLS),
        pytest.param(64, "both", marks=pytest.mark.thorough),
    ],
)
def test_one_step(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
    window: int,
    setting: str,
) -> None:
    path = seeing(window)
    served, model = engine(path, **PREFILLS[setting]), reference.load(path)
    prompts = prompts_with_videos(path, window)
    # Not from 0: with 4, a token of the fifth is at a tie of two experts, where the reference moves
    # by 2 when its pixels move by a millionth.
    canvases = [random_ids(CANVAS, 512, seed=20 + i) for i in range(len(prompts))]
    for prompt, canvas in zip(prompts, canvases, strict=True):  # each alone
        read = read_one_step(served, [prompt], [canvas])
        assert_equal_to_reference(model, [prompt], [canvas], read)
    neighbours: list[Prompt] = [random_ids(40 + 100 * i, 497, seed=100 + i) for i in range(2)]
    neighbours.append(random_prompt_with_videos(path, [20, "2 frames", 30], seed=7))
    is_cached = served.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    read = read_one_step(served, prompts, canvases, neighbours, from_cache=is_cached)
    assert_equal_to_reference(model, prompts, canvases, read)


def test_frames_that_see_no_later_token_are_far_from_the_reference(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What stock vLLM computes."""
    path = seeing(16)
    served, model = engine(path, **PREFILLS["plain"]), reference.load(path)
    prompt = random_prompt_with_videos(path, [5, "2 frames", 5], seed=0)
    canvas = random_ids(CANVAS, 512, seed=1)
    monkeypatch.setattr(DiffusionModelState, "image_spans", lambda *_: None)
    read = read_one_step(served, [prompt], [canvas])
    with pytest.raises(AssertionError):
        assert_equal_to_reference(model, [prompt], [canvas], read)


def test_most_frames_of_a_long_video(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
) -> None:
    """32, evenly taken, in parts of 96 tokens: more than one step, and the encoder's whole cache.
    Another request, which is at its own video, waits for its turn."""
    path = seeing(16)
    served = engine(path, **PREFILLS["both"], max_model_len=4096)
    model = reference.load(path)
    frames, metadata = random_video(70, (64, 64), seed=1)
    kept = [i * 70 // 32 for i in range(32)]
    seen = metadata | {"frames_indices": [metadata["frames_indices"][i] for i in kept]}
    prompt = reference.Seen.prepare(path, [9, VIDEO_ID, 8], [], [(frames[kept], seen)])
    assert len(prompt) > 32 * 64
    sent = reference.Seen(prompt.tokens, [], prompt.inputs, [(frames, metadata)])
    other = random_prompt_with_videos(path, [5, "3 frames", 5], seed=3)
    canvases = [random_ids(CANVAS, 512, seed=i) for i in range(3)]
    prompts = [sent, other, sent]
    assert_equal_to_reference(model, prompts, canvases, read_one_step(served, prompts, canvases))


def test_cache_hits_are_by_what_a_video_shows_and_when(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
) -> None:
    """No hit ends in a frame; one may end between two frames of a video."""
    path = seeing(16)
    served, model = engine(path, **PREFILLS["prefix-caching"]), reference.load(path)
    frames, metadata = random_video(3, (64, 64), seed=1)
    tokens = [*range(20, 60), VIDEO_ID, *range(100, 200)]
    slower, other = metadata | {"fps": 5.0}, random_video(3, (64, 64), seed=2)[0]
    one, late, new = (
        reference.Seen.prepare(path, tokens, [], [video])
        for video in ((frames, metadata), (frames, slower), (other, metadata))
    )
    canvas = random_ids(CANVAS, 512, seed=3)
    params = SamplingParams(
        max_tokens=1, extra_args={"diffusion_max_steps": 1, "diffusion_read_only": True}
    )

    def hits(prompt: reference.Seen) -> int:
        request = prompt.engine_input | {"multi_modal_uuids": {"video": ["a name"]}}
        return served.llm.generate(request, params, use_tqdm=False)[0].num_cached_tokens

    before_video, whole = 32, len(one) // 32 * 32
    assert [hits(one), hits(one)] == [0, whole]
    assert [hits(late), hits(new)] == [before_video, before_video]
    for prompt in (one, late, new):
        read = read_one_step(served, [prompt], [canvas])
        assert_equal_to_reference(model, [prompt], [canvas], read)
    # The first two frames fill three blocks and a half; the next turn has other text behind them.
    fork = reference.Seen.prepare(path, [*tokens[:50], 9, 9], [], one.videos)
    assert hits(fork) % 32 == 0
    read = read_one_step(served, [fork], [canvas], from_cache=True)
    assert_equal_to_reference(model, [fork], [canvas], read)


def test_next_turn_reuses_an_answer_about_a_video(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
) -> None:
    path = seeing(16)
    served, model = engine(path, **CACHED), reference.load(path)
    first = random_prompt_with_videos(path, [10, "2 frames", 12], seed=3)
    params = SamplingParams(max_tokens=64, ignore_eos=True, extra_args=FEW_STEPS)
    answer = served.llm.generate(first.engine_input, params, use_tqdm=False)[0].outputs[0].token_ids
    answer = [9 if token in (IMAGE_ID, VIDEO_ID) else token for token in answer]
    turn = reference.Seen.prepare(
        path,
        [*first.tokens, *answer, VIDEO_ID, *range(20, 25)],
        [],
        [*first.videos, random_video(2, (50, 20), 9)],
    )
    canvas = random_ids(CANVAS, 512, seed=8)
    read = read_one_step(served, [turn], [canvas], from_cache=True)
    assert_equal_to_reference(model, [turn], [canvas], read)


@pytest.mark.parametrize(("num_prompts", "steps"), [(20, 1), (2, 2)])
def test_whole_trajectories(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
    num_prompts: int,
    steps: int,
) -> None:
    """Two blocks, the first of which is committed behind the videos."""
    path = seeing(16)
    served, model = engine(path, **TRACED), reference.load(path)
    model.generation_config.max_denoising_steps = steps
    prompts = [
        random_prompt_with_videos(path, [i % 7, f"{1 + i % 3} frames", i % 5], seed=i)
        for i in range(num_prompts)
    ]
    lengths = [2 * CANVAS] * num_prompts
    ours = served_trajectories(served, prompts, lengths, diffusion_max_steps=steps)
    num_parted = 0
    for seed, (prompt, trajectory) in enumerate(zip(prompts, ours, strict=True)):
        again = partial(reference.generate_with_noise, model, prompt, seed, 2 * CANVAS)
        expected = again()
        assert trajectory.block_lengths == expected.block_lengths == [steps, steps]
        num_parted += parted(model, trajectory, expected, again)
    assert num_parted <= tolerances.PARTED * num_prompts


def test_preempted_prompts_with_videos(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
) -> None:
    """They come back and see the same."""
    path = seeing(64)
    prompts = [random_prompt_with_videos(path, [10, "2 frames", 5], seed=i) for i in range(5)]
    params = [
        SamplingParams(
            max_tokens=96, ignore_eos=True, seed=i, extra_args={"diffusion_max_steps": 1}
        )
        for i in range(len(prompts))
    ]
    inputs = [engine_input(prompt) for prompt in prompts]

    def answers(served: Engine) -> list[list[int]]:
        outputs = served.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    options = {"enable_prefix_caching": False, "disable_log_stats": False}
    expected = answers(engine(path, **options))
    narrow = engine(path, num_gpu_blocks_override=40, block_size=32, max_model_len=288, **options)
    found = answers(narrow)
    assert preemptions(narrow) > 0
    assert found == expected


def test_arrays_that_are_no_videos(
    engine: Callable[..., Engine],
    seeing: Callable[[int], Path],  # noqa: F811
) -> None:
    served = engine(seeing(16), **PREFILLS["plain"])
    frames, metadata = random_video(3, (20, 20), seed=1)
    for video, complaint in [
        ((frames.astype(np.float32), metadata), "array of uint8"),
        ((frames[:, :, :, :1], metadata), r"array of uint8 .* got uint8 \[3, 20, 20, 1\]"),
        ((frames[:0], metadata | {"frames_indices": []}), "array of uint8"),
        ((frames[:2], metadata), "each of its 2 frames, got 3"),
        (frames, "metadata is required"),
    ]:
        prompt = {"prompt_token_ids": [VIDEO_ID], "multi_modal_data": {"video": [video]}}
        with pytest.raises((VLLMValidationError, ValueError), match=complaint):
            served.llm.generate(prompt, use_tqdm=False)
