"""Lines of vLLM's log that are wrong on a CPU, left out there.

vLLM warns in each of its processes that Triton has no backend for it, then that Triton is not
installed. It is, and the kernels that vLLM writes in it are replaced here (`vllm_dllm.cpu`).
"""

import logging

from vllm_dllm.compat.log_lines import WRONG_ON_CPUS


def install() -> None:
    """Call it before vLLM looks for Triton; it imports nothing of vLLM. Repeatable."""
    for name in WRONG_ON_CPUS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(WRONG_ON_CPUS[record.name])
