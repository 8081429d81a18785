"""A start refuses a chat template that never ends, and no other."""

import json
import signal
from pathlib import Path

import pytest

from tests.paths import CHECKPOINTS
from vllm_dllm.startup.model_folder import check_chat_template

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def in_a_file(folder: Path, template: str) -> Path:
    (folder / "chat_template.jinja").write_text(template)
    return folder / "chat_template.jinja"


def in_the_tokenizer(folder: Path, template: str) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder / "tokenizer_config.json"


@pytest.mark.parametrize("write", [in_a_file, in_the_tokenizer])
def test_one_that_does_not_end(tmp_path: Path, write) -> None:
    file = write(tmp_path, ENDLESS)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ValueError) as refusal:
        check_chat_template(tmp_path, limit_s=0.2)
    assert str(refusal.value).startswith(
        f"The chat template in {file} must end, got one that was not done with 'Hi' after 0.2 s."
    )
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content }}", "{% if %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"],
)
def test_what_ends_is_left_to_vllm(tmp_path: Path, template: str) -> None:
    in_a_file(tmp_path, template)
    check_chat_template(tmp_path)


def test_a_tokenizer_with_templates_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{}]}')
    check_chat_template(tmp_path)


@pytest.mark.parametrize("name", ["diffusiongemma-tiny", "qwen3-tiny-target"])
def test_ours(name: str) -> None:
    check_chat_template(CHECKPOINTS / name)
