"""The picture that the demo saves."""

import base64
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from PIL import Image

from tests.unit.tools.demo.recorded import PIXELS, RECORDED, steps
from vllm_dllm.tools.demo import drawing
from vllm_dllm.tools.demo.questions import Question


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "canvas.svg"
    drawing.save_picture(path, Question("Sort: <dog> & cat"), steps(*RECORDED))
    texts = [element.text for element in ElementTree.parse(path).iter() if element.text]
    words = [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts]
    assert "Sort: <dog> & cat" in words
    assert [word for word in words if word.startswith("step")] == ["step  1", "step  2", "step  3"]
    # The guesses of the first step, in the widths of the finished text: "house" became "dog".
    assert words[words.index("step  1") + 1 :][:3] == ["cat", "mhou", "·"]
    assert "cat dog·" in words


def test_picture_of_a_question_about_a_picture(tmp_path: Path, with_picture: Question) -> None:
    path = tmp_path / "canvas.svg"
    heights = []
    for question in (Question(with_picture.text), with_picture):
        drawing.save_picture(path, question, steps(*RECORDED))
        root = ElementTree.parse(path).getroot()
        heights.append(float(root.attrib["viewBox"].split()[3]))
        shown = list(root.iter("{http://www.w3.org/2000/svg}image"))
        assert len(shown) == (question.picture is not None)
    (image,) = shown
    drawn = base64.b64decode(image.attrib["href"].partition("base64,")[2])
    assert Image.open(io.BytesIO(drawn)).size == PIXELS.size
    assert (int(image.attrib["width"]), int(image.attrib["height"])) == (8, 12)
    assert heights[1] - heights[0] > 12


def test_a_picture_of_a_model_that_is_sure(tmp_path: Path) -> None:
    sure = steps(*(step | {"mean_entropy": 0.0} for step in RECORDED))
    drawing.save_picture(tmp_path / "canvas.svg", Question("Sort: b a"), sure)
    assert "0.000" in (tmp_path / "canvas.svg").read_text()


def test_a_picture_shows_both_ends_of_many_steps() -> None:
    many = steps(*(RECORDED[0] | {"step": number} for number in range(1, 49)))
    numbers = [step.number for step in drawing.select_evenly(many, 28)]
    assert len(numbers) == 28 and numbers[0] == 1 and numbers[-1] == 48
    assert numbers == sorted(set(numbers))
