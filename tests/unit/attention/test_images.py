"""Who sees whom in prompts with images: `masks.visible` is what transformers' DiffusionGemma
computes, and the CPU backend takes images of a step apart."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import (
    DiffusionGemmaTextConfig,
)
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaEncoderModel

from attention_kernels.masks import visible
from attention_kernels.testing import PagedBatch, Request
from tests.unit.attention.metadata import common_metadata
from vllm_dllm.attention import WindowRules
from vllm_dllm.cpu.attention.backend import split_at_images

W = 16
PROMPTS = {  # length, images
    "text": (40, ()),
    "one": (40, ((5, 15),)),
    "first and last": (40, ((0, 7), (33, 40))),
    "side by side": (40, ((3, 9), (10, 20))),
    "one fewer than the window": (50, ((20, 20 + W - 1),)),
    "as the window": (50, ((20, 20 + W),)),
    "one more than the window": (50, ((20, 20 + W + 1),)),
    "three windows": (100, ((20, 20 + 3 * W),)),
    "three": (100, ((2, 30), (31, 40), (60, 95))),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_definition_is_what_generate_computes(name: str) -> None:
    """The masks that transformers' `generate` makes for its encoder, which reads a prompt. (The
    encoder called by itself makes these masks, too, and then does not use them.)"""
    length, images = PROMPTS[name]
    config = DiffusionGemmaTextConfig(
        sliding_window=W,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention="vision",
    )
    config._attn_implementation = "eager"
    types = torch.zeros(1, length, dtype=torch.int64)
    for first, end in images:
        types[:, first:end] = 1
    masks = DiffusionGemmaEncoderModel.create_masks_for_generate(
        config=config,
        inputs_embeds=torch.empty(1, length, 0),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        past_key_values=None,
        position_ids=torch.arange(length)[None],
        mm_token_type_ids=types,
    )
    position = torch.arange(length)
    spans = Request(length, 0, images=images).spans()[:, None]
    for layer, window_left in (("sliding_attention", W - 1), ("full_attention", -1)):
        ours = visible(position[:, None], position, 0, True, window_left, spans=spans)
        assert torch.equal(masks[layer][0, 0] == 0, ours), layer


def small_batch(*requests: Request) -> PagedBatch:
    return PagedBatch.random(requests, num_heads=1, num_kv_heads=1, head_size=16, block_size=16)


def test_an_image_becomes_a_request() -> None:
    batch = small_batch(
        Request(0, 9),
        Request(4, 30),
        Request(10, 5, causal=True, images=((4, 8), (8, 12))),
        Request(0, 3),
    )
    step, rules, images = split_at_images(
        common_metadata(batch), WindowRules(batch.symmetric, batch.spans)
    )
    assert step.query_start_loc.tolist() == [0, 4, 7, 11, 14]
    assert step.seq_lens.tolist() == [34, 8, 12, 15]
    assert step.causal.tolist() == [0, 0, 0, 1]
    assert rules.symmetric is not None and rules.symmetric.tolist() == [0, 1, 1, 0]
    assert torch.equal(step.block_table_tensor, batch.block_table[[1, 2, 2, 2]])
    assert [vars(image) for image in images] == [
        {"request": 1, "rows": slice(4, 7), "first_key": 4, "end": 8},
        {"request": 2, "rows": slice(7, 11), "first_key": 8, "end": 12},
    ]


def test_text_is_left_alone() -> None:
    step, rules = SimpleNamespace(), WindowRules()
    assert split_at_images(step, rules) == (step, rules, [])  # type: ignore[arg-type]


def test_an_image_that_was_cut_is_noticed() -> None:
    batch = small_batch(Request(10, 5, causal=True, images=((6, 12),)))
    assert batch.spans is not None
    batch.spans[batch.spans == 12] = 20
    with pytest.raises(AssertionError, match="has the last row of its images"):
        split_at_images(common_metadata(batch), WindowRules(batch.symmetric, batch.spans))
