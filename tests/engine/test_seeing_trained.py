"""The shipped checkpoint that sees: whole generations about held-out pictures equal transformers',
and are right."""

import json

import pytest

from checkpoints.recipes.images.prompts import read_images
from tests import tolerances
from tests.engine import reference
from tests.engine.conftest import GetEngine
from tests.engine.test_trajectories import parted, served_trajectories
from tests.paths import CHECKPOINTS

pytestmark = pytest.mark.numerics

SEEING = CHECKPOINTS / "diffusiongemma-tiny-vision"


@pytest.mark.parametrize("stride", [20, pytest.param(2, marks=pytest.mark.thorough)])
def test_trajectories_and_answers(engine: GetEngine, stride: int) -> None:
    """All prompts at once in the engine, every second one in transformers, with the same noise.
    Compiling takes longer than the few."""
    served, model = engine(SEEING, enforce_eager=stride > 2), reference.load(SEEING)
    tokenizer = served.llm.get_tokenizer()
    lines = (CHECKPOINTS / "held_out_images.jsonl").read_text().splitlines()[::stride]
    rows = [json.loads(line) for line in lines]
    prompts = [
        reference.Seen.prepare(
            SEEING,
            tokenizer.apply_chat_template(
                [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, row["messages"][0]["content"][1]],
                    }
                ],
                add_generation_prompt=True,
                return_dict=False,
            ),
            read_images(row["messages"]),
        )
        for row in rows
    ]
    canvas_length = model.config.canvas_length
    ours = served_trajectories(served, prompts, [canvas_length] * len(rows))
    num_parted = num_right = 0
    for seed, (row, prompt, trajectory) in enumerate(zip(rows, prompts, ours, strict=True)):
        if seed % 2 == 0:
            expected = reference.generate_with_noise(model, prompt, seed, canvas_length)
            num_parted += parted(model, trajectory, expected)
        end = trajectory.tokens.index(tokenizer.eos_token_id)
        num_right += tokenizer.decode(trajectory.tokens[:end]) == row["answer"]
    assert num_parted <= tolerances.PARTED * len(rows) / 2
    assert num_right >= 0.9 * len(rows)
