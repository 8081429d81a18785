"""The model that sees is trained on what `generate` computes; a run may be stopped at any time."""

import argparse
import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.batches import collate
from checkpoints.recipes.exact_match import generate_inputs
from checkpoints.recipes.forward import TrainingForward
from checkpoints.recipes.images import steps, train
from checkpoints.recipes.images.patches import to_patches
from checkpoints.recipes.images.prompts import prompt_ids, read_images
from checkpoints.recipes.images.seeing import save_seeing, start_seeing
from checkpoints.recipes.images.tasks import IMAGE_TASKS, generate_image
from checkpoints.recipes.images.train_tower import CaptionTower, caption_loss
from checkpoints.recipes.muon import MuonAdamW
from checkpoints.recipes.tokenizer import BOI_ID, EOI_ID, IMAGE_ID, build_tokenizer
from tests import tolerances
from tests.engine import reference
from tests.paths import CHECKPOINTS

pytestmark = pytest.mark.numerics

TEXT = CHECKPOINTS / "diffusiongemma-tiny"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("seeing")
    tokenizer = build_tokenizer()
    save_seeing(start_seeing(len(tokenizer), TEXT), tokenizer, path)
    return path


def options(seeing: Path, folder: Path, count: int) -> argparse.Namespace:
    given = ["--init-from", str(seeing), "--out", str(folder / "out")]
    given += ["--state", str(folder / "state"), "--steps", str(count), "--images", "4"]
    return train.parser().parse_args([*given, "--tokens-per-batch", "1100", "--log-every", "1"])


def one_token_each(ids: list[int]) -> list[int]:
    """The prompt before its images got their tokens and marks."""
    pairs = itertools.pairwise([None, *ids])
    kept = [token for before, token in pairs if not before == token == IMAGE_ID]
    return [token for token in kept if token not in (BOI_ID, EOI_ID)]


@torch.no_grad()
def test_forward_equals_transformers(seeing: Path) -> None:
    """Two pictures of different sizes, so that one prompt is padded, and one prompt has both."""
    model = reference.load(seeing)
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    examples = [generate_image(rng, task, held_out=False) for task in ("image_add", "image_digit")]
    pictures = [example.picture.image for example in examples]
    shown = [[pictures[0]], [pictures[1]], pictures]
    parts = [example.template_messages()[0]["content"] for example in examples]
    contents = [*parts, parts[0] + parts[1]]
    prompts = [
        prompt_ids(tokenizer, [{"role": "user", "content": content}], images)
        for content, images in zip(contents, shown, strict=True)
    ]
    canvas_length = model.config.canvas_length
    batch = collate([(ids, [0] * canvas_length, [1.0] * canvas_length) for ids in prompts])
    values, places = to_patches([image for images in shown for image in images])
    seen = model.model.encoder.get_image_features(values, places, return_dict=True).pooler_output
    forward = TrainingForward(model)
    canvases = torch.randint(512, (len(prompts), 1, canvas_length))
    ours = forward.decode(canvases, forward.encode(batch.prefix, batch.is_token, seen), None)
    for i, images in enumerate(shown):
        prompt = reference.Seen.prepare(seeing, one_token_each(prompts[i]), images)
        assert prompt.ids == prompts[i]
        theirs = reference.first_step_logprobs(model, prompt, canvases[i, 0].tolist())
        torch.testing.assert_close(
            ours[i, 0].log_softmax(-1), theirs, rtol=0, atol=tolerances.LOGIT
        )


def test_captions_are_learnt() -> None:
    """A few steps on few pictures."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    module = CaptionTower(start_seeing(len(tokenizer), TEXT), tokenizer)
    optimizer = MuonAdamW(module, muon_lr=1e-2, adam_lr=3e-3, weight_decay=0.0)
    rng = random.Random(0)
    pictures = [generate_image(rng, task, held_out=False).picture for task in IMAGE_TASKS]
    losses = []
    for _ in range(15):
        loss, values = caption_loss(module, pictures)
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
        assert all(0 <= values[name] <= 1 for name in ("right", "captions", "marks"))
    assert losses[-1] < losses[0] / 2


def test_a_stopped_run_ends_as_if_it_had_not_been(
    seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train.train(options(seeing, whole, 3))

    class Stopped(Exception):
        pass

    saved = steps.save_state

    def save_and_stop(*args) -> None:
        saved(*args)
        raise Stopped

    monkeypatch.setattr(steps, "SAVE_SECONDS", -1.0)  # after every step
    monkeypatch.setattr(steps, "save_state", save_and_stop)
    for _ in range(2):
        with pytest.raises(Stopped):
            train.train(options(seeing, parted, 3))
    monkeypatch.setattr(steps, "save_state", saved)
    train.train(options(seeing, parted, 3))
    states = [torch.load(folder / "state", weights_only=True) for folder in (whole, parted)]
    assert states[0]["entries"] == states[1]["entries"]
    assert [entry["step"] for entry in states[0]["entries"]] == [1, 2, 3]
    for name, weight in states[0]["module"].items():
        assert torch.equal(weight, states[1]["module"][name]), name


def test_a_step_teaches(seeing: Path, tmp_path: Path) -> None:
    """The same step again and again: tower and text model both move, and the loss falls."""
    args = options(seeing, tmp_path, 10)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(seeing, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = MuonAdamW(model, muon_lr=5e-3, adam_lr=3e-3, weight_decay=0.0)
    one_step = train.make_step(model, build_tokenizer(), optimizer, args)
    losses = []
    for _ in range(8):
        torch.manual_seed(0)
        losses.append(one_step(random.Random(0), 5)["image_loss"])
    assert losses[-1] < losses[0] / 2
    moved = {name for name, weight in model.named_parameters() if not weight.equal(before[name])}
    for part in ("vision_tower.encoder", "embed_vision", "language_model.layers"):
        assert any(part in name for name in moved), part


def test_prompts_of_exact_match_are_the_processors(seeing: Path) -> None:
    """Padded on the left; the pictures of all prompts in order."""
    tokenizer = build_tokenizer()
    rng = random.Random(1)
    examples = [generate_image(rng, task, held_out=True) for task in ("image_row", "image_count")]
    chats = [example.messages() for example in examples]
    shown = [read_images(messages) for messages in chats]
    prompts = [prompt_ids(tokenizer, *pair) for pair in zip(chats, shown, strict=True)]
    inputs = generate_inputs(prompts, [image for images in shown for image in images])
    for i, images in enumerate(shown):
        expected = reference.Seen.prepare(seeing, one_token_each(prompts[i]), images).inputs
        length = len(prompts[i])
        is_token = inputs["attention_mask"][i].bool()
        assert is_token.tolist() == [False] * (len(is_token) - length) + [True] * length
        for name in ("input_ids", "mm_token_type_ids"):
            assert torch.equal(inputs[name][i][is_token], expected[name][0]), name
        places = inputs["image_position_ids"][i]
        assert torch.equal(places, expected["image_position_ids"][0, : len(places)])
        values = expected["pixel_values"][0, : len(places)].float()
        torch.testing.assert_close(inputs["pixel_values"][i], values, **tolerances.short_formula())
