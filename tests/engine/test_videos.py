"""Prompts with videos equal transformers' DiffusionGemma, whose processor makes timed frames of
them: what they have and images have not. The rest is in `test_images.py`."""

import pytest
from vllm import SamplingParams

from checkpoints.recipes.tokenizer import VIDEO_ID
from tests.engine import reference
from tests.engine.conftest import GetEngine, GetTiny
from tests.engine.images import random_prompt_with_videos, random_video
from tests.engine.one_step import (
    PREFILLS,
    assert_equal_to_reference,
    random_ids,
    read_one_step,
)
from tests.engine.test_images import CANVAS

pytestmark = pytest.mark.numerics


def test_most_frames_of_a_long_video(engine: GetEngine, seeing: GetTiny) -> None:
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


def test_cache_hits_are_by_what_a_video_shows_and_when(engine: GetEngine, seeing: GetTiny) -> None:
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
