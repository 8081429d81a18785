"""Gemma's layers with their experts beside their dense MLP, on another CUDA stream.

Both halves read the residual, and neither reads the other. In a step of one canvas the experts wait
for memory, and a dozen of their kernels are too small to fill a GPU: routing, sorting, quantising.
The dense half fits in between. The router's product runs on the second stream, too, so that the
dense half does not wait for it; its norm is part of one kernel with the others. vLLM does this with
shared experts, which are added to the routed ones at once. Gemma's halves have a norm each before
the sum.

Measured on an H200 (`bench/results/h200/halves.json`): both take 0.234 ms instead of 0.262 with 256
tokens, 0.870 instead of 0.907 with 4,096, and are never slower. That is without the router, which
took 9 us before both in a step of 256. vLLM's setting
VLLM_DISABLE_SHARED_EXPERTS_STREAM keeps one stream.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.models.gemma4 import Gemma4DecoderLayer
from vllm.platforms import current_platform
from vllm.utils.torch_utils import aux_stream, current_stream, direct_register_custom_op

IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Inductor's settings with which it launches operations in the order of the source. Else it moves
the dense half before the experts, where nothing runs beside it."""


def allow_concurrent_experts(vllm_config: VllmConfig) -> bool:
    """Returns whether Gemma's layers may launch their experts on a second stream of the GPU. If so,
    adds `IN_ORDER` to the compiler's settings in `vllm_config`, in place. Call it before the model
    is built, which copies these settings.

    Layers keep vLLM's order on other devices, where a user wants one stream, where ranks share a
    layer (the sum over ranks would have to wait, too), and with adapters, which have streams of
    their own.
    """
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    config = vllm_config.model_config.hf_text_config
    allowed = (
        current_platform.is_cuda()
        and bool(getattr(config, "num_experts", None))
        and not getattr(config, "hidden_size_per_layer_input", None)
        and not envs.VLLM_DISABLE_SHARED_EXPERTS_STREAM
        and parallel.world_size_across_dp == 1
        and vllm_config.lora_config is None
        # Of graphs in parts, one part may not wait for what another has launched.
        and "vllm::moe_forward" not in (compilation.splitting_ops or ())
    )
    if allowed:
        compilation.inductor_compile_config.update(IN_ORDER)
    return allowed


def run_experts_beside_mlp(layers: Iterable[Any]) -> None:
    """Makes Gemma's layers launch their experts on a second stream. `layers`: all of a model for
    which `allow_concurrent_experts` returned True."""
    for layer in layers:
        layer.__class__ = ConcurrentLayer
        run = layer.experts._forward_impl
        layer.experts._forward_impl = _second_stream.wrap(run, layer.router.proj)


class ConcurrentLayer(Gemma4DecoderLayer):
    """The stock layer, with its experts launched before the dense MLP and awaited after it."""

    def forward(
        self,
        positions: torch.Tensor,  # [T]
        hidden_states: torch.Tensor,  # [T, H]
        residual: torch.Tensor | None,
        per_layer_input: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the next layer's hidden states [T, H]: to the bit what the stock layer does, but
        for compiled steps of up to 16 rows. In these vLLM has another kernel for the router's
        product on Hopper and later chips, which a stock layer's graph never runs."""
        if self.experts.moe_config.hidden_dim != self.hidden_size:
            # Experts would read a padded copy, which does not live until they are awaited.
            stock = Gemma4DecoderLayer.forward
            return stock(self, positions, hidden_states, residual, per_layer_input, **kwargs)
        attended = self.self_attn(
            positions=positions, hidden_states=self.input_layernorm(hidden_states), **kwargs
        )
        residual = self.post_attention_layernorm(attended) + hidden_states

        expert_rows = self.pre_feedforward_layernorm_2(residual)
        dense_rows = self.pre_feedforward_layernorm(residual)
        router_rows = rows_of_router(self.router, residual)
        torch.ops.vllm.vllm_dllm_begin_experts(router_rows)
        mixed = self.experts(expert_rows, router_rows)  # in the place of logits
        dense = self.mlp(dense_rows)
        torch.ops.vllm.vllm_dllm_await_experts(mixed, dense, expert_rows, router_rows)

        halves = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(mixed)
        return (self.post_feedforward_layernorm(halves) + residual) * self.layer_scalar, None


def rows_of_router(router: Any, states: torch.Tensor) -> torch.Tensor:
    """Returns what `router.proj` reads, [T, H]: the first half of `Gemma4Router.forward`."""
    rows: torch.Tensor = router.norm(states)
    return rows * router.root_size.to(rows.dtype) * router.scale.to(rows.dtype)


class _SecondStream:
    """Runs experts on the second stream, with two events, since layers run one after the other."""

    _wraps_experts = False
    _is_awaited = False  # whether the caller of the next experts calls `wait`
    _is_running = False

    @cached_property
    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """When the experts' input is ready, and when their result is."""
        return torch.cuda.Event(), torch.cuda.Event()

    def begin(self) -> None:
        """Has the next experts run on the second stream. Their caller gives them the router's rows
        in the place of logits, and calls `wait` before it reads the result. A compiled graph of
        stock layers, kept since an earlier start, does not call this."""
        # Else rows would be taken for logits.
        assert self._wraps_experts, "the compiled graph is of other layers than these"
        self._is_awaited = True

    def wrap(
        self, run: Callable[..., torch.Tensor], project: Callable[..., Any]
    ) -> Callable[..., torch.Tensor]:
        """Returns a function that runs experts on the second stream after `begin`, and else as
        before.

        Args:
            run: computes the experts for states [T, H] and logits [T, E].
            project: makes logits [T, E] of the router's rows [T, H], the first of a tuple.
        """
        self._wraps_experts = True

        def run_beside(states: torch.Tensor, routing: torch.Tensor, *inputs: Any) -> torch.Tensor:
            """Returns at once; the result can be read after `wait`. `routing`: the router's rows
            after `begin`, else logits."""
            if not self._is_awaited:
                return run(states, routing, *inputs)
            self._is_awaited = False
            stream = aux_stream()
            assert stream is not None
            ready, done = self._events
            ready.record(current_stream())
            with torch.cuda.stream(stream):
                ready.wait(stream)
                mixed = run(states, project(routing)[0], *inputs)
                done.record(stream)
            self._is_running = True
            return mixed

        return run_beside

    def wait(self) -> None:
        """Makes the current stream wait for what runs on the second one, if anything does."""
        if self._is_running:
            self._events[1].wait(current_stream())
            self._is_running = False


_second_stream = _SecondStream()


def _begin_experts(router_rows: torch.Tensor) -> None:
    """Has the experts that `router_rows` choose run on the second stream. The compiler takes the
    call for a change of these rows, and so leaves it before the experts."""
    _second_stream.begin()


def _await_experts(
    mixed: torch.Tensor, dense: torch.Tensor, expert_rows: torch.Tensor, router_rows: torch.Tensor
) -> None:
    """Makes the current stream wait for the experts' result, `mixed`. The other arguments keep the
    compiler from computing `dense` later, and from reusing memory that the experts read."""
    _second_stream.wait()


for name, run, changed in (
    ("begin_experts", _begin_experts, "router_rows"),
    ("await_experts", _await_experts, "mixed"),
):
    direct_register_custom_op(f"vllm_dllm_{name}", run, [changed], lambda *tensors: None)
