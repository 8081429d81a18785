"""A checkpoint's chat template is a program. One that never ends would block every chat, and one of
vLLM's few threads for each, so it is run once before anything is loaded.
"""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

MOST_SECONDS = 20.0
"""Templates take milliseconds; a machine may be busy."""
_CHAT = [{"role": "user", "content": "Hi"}]


class _TookTooLong(BaseException):
    """Caught by no template engine."""


def check_chat_template(folder: Path, most_seconds: float = MOST_SECONDS) -> None:
    """Raises ValueError if the template in a checkpoint's folder does not come to an end. What else
    is wrong with a template is said to those who send chats."""
    # Only there Python lets us interrupt.
    if threading.current_thread() is not threading.main_thread():
        return
    for source, template in _templates(folder):
        try:
            with _limited(most_seconds), contextlib.suppress(Exception):
                render_jinja_template([_CHAT], chat_template=template, add_generation_prompt=True)
        except _TookTooLong:
            raise ValueError(
                f"The chat template in {source} must end, got one that was not done with 'Hi' "
                f"after {most_seconds:g} s. Correct its loops, or remove it and name another with "
                f"--chat-template."
            ) from None


def _templates(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each file with a template, and the template."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield folder / "chat_template.jinja", (folder / "chat_template.jinja").read_text()
    config: Any = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "tokenizer_config.json").read_text())
    if isinstance(config, dict) and isinstance(config.get("chat_template"), str):
        yield folder / "tokenizer_config.json", config["chat_template"]


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TookTooLong in the code inside, once it has run for so long."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
