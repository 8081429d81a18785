"""Experts beside the dense MLP: nothing reads their result too early or changes what they read."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import metrics
from vllm.model_executor.models.gemma4 import Gemma4DecoderLayer
from vllm.utils.torch_utils import direct_register_custom_op

from tests import tolerances
from vllm_dllm.compat import concurrent_experts
from vllm_dllm.compat.concurrent_experts import IN_ORDER, ConcurrentLayer
from vllm_dllm.compat.row_reductions import SETTINGS

HIDDEN, EXPERTS, TOKENS = 32, 4, 7


class LateExperts:
    """A second stream that computes as late as it may: when the first one waits for it. Until then
    its result is not a number."""

    def __init__(self) -> None:
        self.begun: list[tuple[torch.Tensor, ...]] = []
        self.seen: list[bool] = []
        """Whether experts were running at each product of the dense half."""
        self.announced = self.awaited = 0

    def begin(self) -> None:
        self.announced += 1

    def start(self, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert self.announced == self.awaited + 1
        result = torch.full_like(rows, float("nan"))
        self.begun.append((rows, logits, result))
        return result

    def wait(self) -> None:
        (rows, logits, result) = self.begun.pop()
        result.copy_(compute_experts(rows, logits))
        self.awaited += 1


late = LateExperts()


def compute_experts(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows) * logits.softmax(-1).amax(-1, keepdim=True)


def experts_at_once(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return compute_experts(rows, logits)


def experts_late(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return late.start(rows, logits)


def dense_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    late.seen.append(bool(late.begun))
    return rows @ weight.T


def like_rows(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows)


def like_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(rows), len(weight))


for name, run, fake in (
    ("experts_at_once", experts_at_once, like_rows),
    ("experts_late", experts_late, like_rows),
    ("dense_product", dense_product, like_product),
):
    direct_register_custom_op(f"vllm_dllm_test_{name}", run, fake_impl=fake)


class DenseHalf(nn.Module):
    """With what a compiler would like to move: rows that are scaled before a product, as quantising
    does, and halves of a product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(128, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(HIDDEN, 64) / 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product = torch.ops.vllm.vllm_dllm_test_dense_product
        gate, up = product(rows / rows.abs().amax(-1, keepdim=True), self.gate_up).chunk(2, dim=-1)
        return product(nn.functional.gelu(gate) * up, self.down)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.out(hidden_states)


class Experts(nn.Module):
    """As vLLM's runner of experts is called."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.run, self.moe_config = run, SimpleNamespace(hidden_dim=HIDDEN)

    def forward(self, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.run(rows, logits)


class Layer(nn.Module):
    """What either forward reads of a layer."""

    enable_moe_block = True
    per_layer_input_gate = None
    hidden_size = HIDDEN

    def __init__(self, forward: Callable[..., Any], experts: Callable[..., Any]) -> None:
        super().__init__()
        self._forward, self.experts = forward, Experts(experts)
        self.self_attn, self.router = Attention(), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.mlp = DenseHalf()
        for norm in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "pre_feedforward_layernorm_2", "post_feedforward_layernorm",
            "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
        ):  # fmt: skip
            setattr(self, norm, nn.RMSNorm(HIDDEN))
            nn.init.uniform_(getattr(self, norm).weight)
        self.register_buffer("layer_scalar", torch.full((1,), 0.7))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(hidden_states))
        found: torch.Tensor = self._forward(self, positions, hidden_states, None)[0]
        return found


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    monkeypatch.setattr(concurrent_experts, "_beside", late)
    late.announced = late.awaited = 0
    late.seen.clear()

    def build(forward: Callable[..., Any], experts: Callable[..., Any]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(forward, experts) for _ in range(3)))

    return build


@torch.no_grad()
def test_a_layer_with_late_experts_equals_the_stock_layer(
    stack: Callable[..., nn.Module],
) -> None:
    ops = torch.ops.vllm
    stock = stack(Gemma4DecoderLayer.forward, ops.vllm_dllm_test_experts_at_once)
    ours = stack(ConcurrentLayer.forward, ops.vllm_dllm_test_experts_late)
    states = torch.randn(TOKENS, HIDDEN)
    assert torch.equal(ours(states), stock(states))
    assert late.awaited == 3 and not late.begun


@torch.no_grad()
def test_a_compiler_keeps_the_order_and_has_no_more_to_launch(
    stack: Callable[..., nn.Module],
) -> None:
    """The result is the same, the whole dense half is launched behind the experts, and nothing is
    copied or computed apart for the sake of that."""
    ops = torch.ops.vllm
    stock = stack(Gemma4DecoderLayer.forward, ops.vllm_dllm_test_experts_at_once)
    ours = stack(ConcurrentLayer.forward, ops.vllm_dllm_test_experts_late)
    states = torch.randn(TOKENS, HIDDEN)
    found, kernels = {}, {}
    for name, layers in (("stock", stock), ("ours", ours)):
        metrics.reset()
        late.seen.clear()
        options = {
            **IN_ORDER,
            **SETTINGS,
            "enable_auto_functionalized_v2": False,
        }  # as vLLM compiles
        with torch.compiler.config.patch(force_disable_caches=True):  # or nothing is counted
            found[name] = torch.compile(layers, fullgraph=True, options=options)(states)
        kernels[name] = metrics.generated_kernel_count
    allowed = tolerances.within(tolerances.model(3, 2 * HIDDEN, logits=1.0))
    torch.testing.assert_close(found["ours"], found["stock"], **allowed)
    assert late.seen == 6 * [True] and late.awaited == 3
    assert kernels["ours"] == kernels["stock"] > 0


@torch.no_grad()
def test_padded_rows_are_not_left_to_the_second_stream(stack: Callable[..., nn.Module]) -> None:
    """Nobody would keep them until they are awaited."""
    at_once = torch.ops.vllm.vllm_dllm_test_experts_at_once
    stock, ours = (stack(f, at_once) for f in (Gemma4DecoderLayer.forward, ConcurrentLayer.forward))
    for layer in ours:
        layer.experts.moe_config.hidden_dim = HIDDEN + 1
    states = torch.randn(TOKENS, HIDDEN)
    assert torch.equal(ours(states), stock(states))
    assert late.announced == 0


class Stream:
    """Notes what is done to it, and which one is current."""

    current: "Stream"

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes


class Event:
    def record(self, stream: Stream) -> None:
        stream.notes.append(f"{stream.name} records")

    def wait(self, stream: Stream) -> None:
        stream.notes.append(f"{stream.name} waits")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    Stream.current, second = Stream("first", found), Stream("second", found)

    @contextmanager
    def use(stream: Stream) -> Any:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    make_context: Callable[[Stream], AbstractContextManager[None]] = use
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", make_context)
    monkeypatch.setattr(concurrent_experts, "aux_stream", lambda: second)
    monkeypatch.setattr(concurrent_experts, "current_stream", lambda: Stream.current)
    return found


@pytest.mark.parametrize(
    ("is_awaited", "expected"),
    [
        (True, "first records, second waits, second runs, second records, first waits"),
        (False, "first runs"),
    ],
)
def test_experts_that_are_awaited_run_on_the_second_stream(
    notes: list[str], is_awaited: bool, expected: str
) -> None:
    beside = concurrent_experts._Beside()

    def run(states: str, logits: str) -> str:
        notes.append(f"{Stream.current.name} runs")
        return states + logits

    for _ in range(2):  # layers, one after the other
        if is_awaited:
            beside.begin()
        assert beside.wrap(run)("states", "logits") == "stateslogits"
        beside.wait()
    assert notes == 2 * expected.split(", ")
