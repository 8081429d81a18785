"""How wide the canvases of masked models are, and what is computed anew."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.step import worker
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.requests.options import OPTIONS_KEY
from vllm_dllm.scheduling.families import AlignedBlocks
from vllm_dllm.scheduling.scheduler import CanvasScheduling

B, CONTEXT = 8, 110  # the context ends inside a block


def request(num_tokens: int, acceptance: str) -> Any:
    extra = {OPTIONS_KEY: {"acceptance": acceptance}}
    return SimpleNamespace(num_tokens=num_tokens, sampling_params=SimpleNamespace(extra_args=extra))


def family(in_flight: int) -> AlignedBlocks:
    config = worker.config(
        architecture="SDARForCausalLM",
        canvas_length=in_flight * B,
        context=CONTEXT,
        settings={"blocks_in_flight": in_flight},
    )
    config.compilation_config = SimpleNamespace(cudagraph_mode=None)
    return AlignedBlocks(config, in_flight * B, MaskedConfig.from_vllm_config(config))


@pytest.mark.parametrize("in_flight", [2, 4])
def test_a_copy_of_the_block_follows_a_canvas_that_is_verified(in_flight: int) -> None:
    """Where the context has room for it."""
    served = family(in_flight)
    for num_tokens, own, behind in ((0, 8, 8), (3, 5, 8), (88, 8, 8), (95, 1, 8), (96, 8, 0)):
        verified = request(num_tokens, "verified")
        assert served.num_answer_tokens(verified) == own
        assert served.canvas_width(verified) == own + behind
        assert served.is_partial_block(verified) == (own < B)
        usual = request(num_tokens, "confidence")
        width = in_flight * B - num_tokens % (in_flight * B)
        assert served.canvas_width(usual) == served.num_answer_tokens(usual) == width


def test_without_room_for_two_blocks_nothing_follows() -> None:
    """Such a server refuses the request."""
    assert family(1).canvas_width(request(3, "verified")) == 5


def test_a_session_computes_its_last_block_anew() -> None:
    """Its known tokens have seen positions that have changed."""
    scheduler: Any = SimpleNamespace(family=family(1))
    for num_tokens, computed, reused in ((30, 21, 16), (30, 24, 24), (30, 32, 24)):
        session: Any = SimpleNamespace(num_tokens=num_tokens, num_computed_tokens=computed)
        assert CanvasScheduling.num_computed_of_session(scheduler, session) == reused
