"""How long an engine and its workers ask for each other's next message without a pause."""

from typing import Any

SECONDS = 0.02
"""A step of the shipped model takes 10 ms, and its answer is awaited awake: asleep from the start,
vLLM's readers miss messages, because ZeroMQ drops the second of two calls within about a
millisecond."""


def fall_asleep_soon() -> None:
    """In this process, whose engine shares few cores with its workers. vLLM's readers stay awake
    for a second after each message, and where all cores compute, that is taken from the model: 12
    to 20% of a step of 267 million parameters on two cores. Repeatable."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if SpinCondition.__init__.__module__ == __name__:
        return
    stock_init = SpinCondition.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, SECONDS)

    SpinCondition.__init__ = init
