"""What the demo asks."""

import json
from pathlib import Path

from checkpoints.recipes.tasks import Example
from tests.paths import CHECKPOINTS
from vllm_dllm.tools.demo.questions import PICTURE_QUESTIONS, TEXT_QUESTIONS, questions_for


def test_the_questions_are_held_out() -> None:
    assert 4 <= len(TEXT_QUESTIONS) <= 6
    assert all(Example("", question.text, "").held_out for question in TEXT_QUESTIONS)
    rows = (CHECKPOINTS / "held_out_images.jsonl").read_text().splitlines()
    held_out = [json.loads(row)["messages"][0]["content"] for row in rows]
    assert all(question.message["content"] in held_out for question in PICTURE_QUESTIONS)


def test_pictures_are_for_checkpoints_that_see(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"vision_config": {"model_type": "gemma4_vision"}}')
    assert list(questions_for(tmp_path)) == list(TEXT_QUESTIONS)  # nothing makes patches
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert list(questions_for(tmp_path)) == [*PICTURE_QUESTIONS, *TEXT_QUESTIONS]
    config.write_text('{"vision_config": null}')
    assert list(questions_for(tmp_path)) == list(TEXT_QUESTIONS)
