"""Two lines of vLLM's log that contradict each other, left out where both mislead.

On a CPU vLLM warns in each of its processes that Triton has no backend for it, then that Triton is
not installed. It is, and the kernels that vLLM writes in it are replaced here (`vllm_dllm.cpu`).
"""

import logging

from vllm_dllm.compat.log_lines import NO_TRITON


def install() -> None:
    """Before vLLM looks for Triton, and so without importing vLLM. Repeatable."""
    for name in NO_TRITON:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(NO_TRITON[record.name])
