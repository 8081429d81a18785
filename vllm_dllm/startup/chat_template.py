"""Refuses a chat template that never ends, which would hold up a server at its first chat."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from transformers.utils.chat_template_utils import render_jinja_template

from vllm_dllm.quantization.weight_files import read_json

LIMIT_S = 20.0
"""Seconds that a template may run. It takes milliseconds, but a machine may be busy."""


class _TookTooLong(BaseException):
    """Raised in a slow template. It is no Exception, so that no template engine catches it."""


def check_chat_template(folder: Path, limit_s: float = LIMIT_S) -> None:
    """Runs the chat templates in a checkpoint's folder once. Does nothing outside the main thread.
    Other errors of a template are not raised here: clients who send chats get them.

    Raises:
        ValueError: a template runs for longer than `limit_s` seconds.
    """
    # Python handles signals only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        return
    for source, template in _read_templates(folder):
        try:
            with _time_limit(limit_s), contextlib.suppress(Exception):
                chat = [{"role": "user", "content": "Hi"}]
                render_jinja_template([chat], chat_template=template, add_generation_prompt=True)
        except _TookTooLong:
            raise ValueError(
                f"The chat template in {source} must end, got one that was not done with 'Hi' "
                f"after {limit_s:g} s. Correct its loops, or remove it and name another with "
                f"--chat-template."
            ) from None


def _read_templates(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields each readable file in `folder` with a chat template, and the template."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield folder / "chat_template.jinja", (folder / "chat_template.jinja").read_text()
    config = read_json(folder / "tokenizer_config.json")
    if isinstance(config.get("chat_template"), str):
        yield folder / "tokenizer_config.json", config["chat_template"]


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises _TookTooLong in the context once it has run for `seconds`. Replaces the handler of
    SIGALRM meanwhile, so it must be entered in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
