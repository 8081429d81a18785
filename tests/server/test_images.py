"""Images over HTTP: chats with pictures are answered, bad pictures are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError
from PIL import Image

from tests.documents import programs
from tests.engine.images import random_image
from tests.faults.fuzz import SEEING, Fuzz, make_seeing
from tests.paths import CHECKPOINTS, ROOT
from tests.pictures import data_url as url_of_bytes
from tests.pictures import encoded, write_video
from tests.processes import output_of
from tests.server.conftest import UNCOMPILED, Server, serving

MOST_IMAGES = SEEING.most_images
TOKENS_OF_A_SQUARE = 64 + 2  # 8 x 8 image tokens of 70 at most, and the marks
SQUARES = [random_image((48, 48), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Server]:
    """Serves images from data URLs and one folder, at most three per prompt."""
    checkpoint = make_seeing(folder)
    pictures = folder / "pictures"
    pictures.mkdir()
    SQUARES[0].save(pictures / "square.png")
    options = (
        *("--enforce-eager", "--served-model-name", "seeing", str(checkpoint)),
        *("--limit-mm-per-prompt", f'{{"image": {MOST_IMAGES}}}'),
        *("--allowed-local-media-path", str(pictures)),
    )
    with serving(checkpoint, folder, *options) as server:
        yield server


def data_url(image: Image.Image, form: str = "PNG", **options: Any) -> str:
    return url_of_bytes(encoded(image, form, **options), f"image/{form.lower()}")


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(server: Server, *turns: list[dict[str, Any]], **options: Any) -> Any:
    """A chat whose turns are the user's and the model's, one after the other."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return server.client.chat.completions.create(
        model="seeing", messages=messages, max_tokens=32, seed=1, **options
    )


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content


def test_an_answer_depends_on_what_the_image_shows(seeing: Server, folder: Path) -> None:
    question = text_part("What?")
    plain = ask(seeing, [question])
    answers = [ask(seeing, [image_part(data_url(image)), question]) for image in SQUARES]
    for answer in answers:
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens + TOKENS_OF_A_SQUARE
    assert len({text_of(answer) for answer in (plain, *answers)}) == 3
    file = ask(seeing, [image_part(f"file://{folder}/pictures/square.png"), question])
    assert text_of(file) == text_of(answers[0])


def test_documented_programs(folder: Path) -> None:
    texts = [p.text for p in programs() if p.text.startswith("import base64")]
    outputs = []
    with serving(CHECKPOINTS / "diffusiongemma-tiny-vision", folder, *UNCOMPILED) as server:
        for text in texts:
            there = text.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
            outputs.append(output_of("-c", there, cwd=ROOT))
    assert outputs == ["4+3=7\n", "58 tokens of prompt\n"]


SQUARE = image_part(data_url(SQUARES[0]))
AUDIO = {"type": "audio_url", "audio_url": {"url": "data:audio/mp4;base64,YQ=="}}
REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a file of another folder": ([image_part("file:///etc/passwd")], {}, "must be a subpath"),
    "more than allowed": (
        [SQUARE] * (MOST_IMAGES + 1),
        {},
        rf"at most {MOST_IMAGES} images .*, got 4",
    ),
    "sound": ([AUDIO], {}, "reads text, images and videos"),
    "no video": ([video_part("data:video/mp4;base64,YQ==")], {}, "got another format"),
    "settings of the processor": (
        [SQUARE],
        {"mm_processor_kwargs": {"max_soft_tokens": 1120}},
        "mm_processor_kwargs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(seeing: Server, name: str) -> None:
    """One of each kind; `test_odd_requests` and the unit tests have pictures that are none."""
    parts, options, complaint = REFUSED[name]
    with pytest.raises(BadRequestError, match=complaint):
        ask(seeing, [*parts, text_part("What?")], extra_body=options)


def test_an_image_of_a_refused_request(seeing: Server) -> None:
    turn = [image_part(data_url(random_image((48, 48), 7)))]
    with pytest.raises(BadRequestError, match="diffusion_canvas_length must be at least"):
        ask(seeing, turn, extra_body={"vllm_xargs": {"diffusion_canvas_length": 1}})
    assert ask(seeing, turn).choices[0].finish_reason == "length"


def test_an_answer_depends_on_what_a_video_shows(seeing: Server, tmp_path: Path) -> None:
    """Files, and their frames in single pictures, which come a second apart."""
    question = text_part("What?")
    num_text = ask(seeing, [question]).usage.prompt_tokens
    frames = [np.asarray(image) for image in SQUARES]
    url = url_of_bytes(write_video(tmp_path / "a.mp4", frames, fps=1.0), "video/mp4")
    backwards = url_of_bytes(write_video(tmp_path / "b.mp4", frames[::-1], fps=1.0), "video/mp4")
    single = "data:video/jpeg;base64," + ",".join(
        data_url(image, "JPEG").partition(",")[2] for image in SQUARES
    )
    answers = [ask(seeing, [video_part(url), question]) for url in (url, backwards, single)]
    times = len("00:00 ") + len(" 00:01 ")  # a token each
    expected = num_text + times + 2 * TOKENS_OF_A_SQUARE
    assert [answer.usage.prompt_tokens for answer in answers] == [expected] * 3
    assert len({text_of(answer) for answer in answers}) == 3
    mixed = ask(seeing, [image_part(data_url(SQUARES[0])), video_part(url), question])
    assert mixed.usage.prompt_tokens == expected + TOKENS_OF_A_SQUARE


def test_odd_requests(seeing: Server, folder: Path) -> None:
    """A short form of `tests/faults/test_fuzz.py`, always the same."""
    fuzz = Fuzz(seeing.port, folder / "seeing", SEEING)
    before = fuzz.plain_answers()
    fuzz.run(64)
    assert fuzz.broken == []
    assert fuzz.statuses[200] > 15 and fuzz.statuses[400] > 15
    assert fuzz.plain_answers() == before
