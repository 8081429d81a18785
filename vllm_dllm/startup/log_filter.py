"""Lines of vLLM's log that are wrong, left out: on a CPU, and of what is ours.

On a CPU vLLM warns in each of its processes that Triton has no backend for it, then that Triton is
not installed. It is, and the kernels that vLLM writes in it are replaced here (`vllm_dllm.cpu`).
"""

import logging

from vllm_dllm.compat.log_lines import WRONG_OF_OURS, WRONG_ON_CPUS


def install() -> None:
    """Leaves out what is wrong of ours. Repeatable."""
    for name in WRONG_OF_OURS:
        logging.getLogger(name).addFilter(_is_of_others)


def install_on_cpus() -> None:
    """Leaves out what is wrong on a CPU. Call it before vLLM looks for Triton; it imports nothing
    of vLLM. Repeatable."""
    for name in WRONG_ON_CPUS:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(WRONG_ON_CPUS[record.name])


def _is_of_others(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(WRONG_OF_OURS[record.name]):
        return True
    assert isinstance(record.args, tuple)
    (named,) = record.args
    names = named if isinstance(named, list) else [named]
    return not all(str(name).startswith("vllm_dllm") for name in names)
