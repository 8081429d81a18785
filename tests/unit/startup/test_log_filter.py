"""Warnings of vLLM's that are wrong of what is ours."""

import logging

import pytest

from vllm_dllm.compat import log_lines
from vllm_dllm.compat.log_lines import WRONG_WARNINGS


@pytest.mark.parametrize(
    ("logger", "named", "is_kept"),
    [
        ("vllm.config.scheduler", "vllm_dllm.scheduling.scheduler.make_scheduler", False),
        ("vllm.config.scheduler", "theirs.Scheduler", True),
        ("vllm.plugins", ["vllm_dllm_canvas"], False),
        ("vllm.plugins", ["vllm_dllm_canvas", "theirs"], True),
    ],
)
def test_of_ours_and_of_others(logger: str, named: object, is_kept: bool) -> None:
    log_lines.drop_wrong_warnings()
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        logging.getLogger(logger).warning(f"{WRONG_WARNINGS[logger]} More.", named)
        logging.getLogger(logger).warning("Another line of %s", named)
    finally:
        logging.getLogger(logger).removeHandler(handler)
    assert [record.msg.startswith("Another") for record in heard] == [False, True][not is_kept :]
