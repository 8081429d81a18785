"""What a compiled graph does: router and experts beside the dense MLP, whose result nothing reads
too early, and reductions in one pass."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._inductor import metrics
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from vllm.config.utils import normalize_value
from vllm.model_executor.models.gemma4 import Gemma4DecoderLayer, Gemma4Router
from vllm.utils.torch_utils import direct_register_custom_op

from tests import tolerances
from vllm_dllm.compat import concurrent_experts, row_reductions
from vllm_dllm.compat.concurrent_experts import IN_ORDER, ConcurrentLayer, run_experts_beside_mlp
from vllm_dllm.compat.row_reductions import SETTING, RowsInRegisters, read_rows_once

HIDDEN, EXPERTS, TOKENS = 32, 4, 7


class LateExperts:
    """A second stream that computes as late as it may: when the first one waits for it. Until then
    its result is not a number."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], Any]] = []
        self.seen: list[bool] = []
        """Whether experts were running at each product of the dense half."""
        self.announced = self.awaited = 0

    def begin(self) -> None:
        self.announced += 1

    def wrap(self, run: Callable[..., Any], project: Callable[..., Any]) -> Callable[..., Any]:
        def later(rows: torch.Tensor, router_rows: torch.Tensor, *others: None) -> torch.Tensor:
            assert self.announced == self.awaited + 1
            result = torch.full_like(rows, float("nan"))
            self.begun.append(lambda: result.copy_(run(rows, project(router_rows)[0], *others)))
            return result

        return later

    def wait(self) -> None:
        self.begun.pop()()
        self.awaited += 1


late = LateExperts()
runners: dict[int, "Experts"] = {}


def run_experts(rows: torch.Tensor, routing: torch.Tensor, number: int) -> torch.Tensor:
    return runners[number]._forward_impl(rows, routing, None, None)


def dense_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    late.seen.append(bool(late.begun))
    return rows @ weight.T


def like_rows(rows: torch.Tensor, routing: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(rows)


def like_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(rows), len(weight))


for name, run, fake in (
    ("experts", run_experts, like_rows),
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

    def __init__(self) -> None:
        super().__init__()
        self.moe_config, self.number = SimpleNamespace(hidden_dim=HIDDEN), len(runners)
        runners[self.number] = self

    def forward(self, rows: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.vllm.vllm_dllm_test_experts(rows, routing, self.number)
        return found

    def _forward_impl(self, rows: torch.Tensor, logits: torch.Tensor, *_: None) -> torch.Tensor:
        assert logits.shape == (len(rows), EXPERTS)
        return torch.tanh(rows) * logits.softmax(-1).amax(-1, keepdim=True)


class Projection(nn.Linear):
    """Returns a tuple, as vLLM's linear layers do."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(rows), None


class Router(nn.Module):
    """What either forward reads of a router."""

    forward = Gemma4Router.forward

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, elementwise_affine=False)
        self.scale = nn.Parameter(torch.rand(HIDDEN))
        self.register_buffer("root_size", torch.tensor(HIDDEN**-0.5))
        self.proj = Projection(HIDDEN, EXPERTS, bias=False)


class Layer(Gemma4DecoderLayer):
    """What either forward reads of a layer."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.enable_moe_block, self.per_layer_input_gate = True, None
        self.hidden_size, self.experts = HIDDEN, Experts()
        self.self_attn, self.router = Attention(), Router()
        self.mlp = DenseHalf()
        for norm in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "pre_feedforward_layernorm_2", "post_feedforward_layernorm",
            "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
        ):  # fmt: skip
            setattr(self, norm, nn.RMSNorm(HIDDEN))
            nn.init.uniform_(getattr(self, norm).weight)
        self.register_buffer("layer_scalar", torch.full((1,), 0.7))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(hidden_states))
        for layer in self.layers:
            hidden_states, _ = layer(positions, hidden_states, None)
        return hidden_states


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> tuple[Stack, Stack]:
    """Of stock layers, and of ours."""
    monkeypatch.setattr(concurrent_experts, "_second_stream", late)
    late.announced = late.awaited = 0
    late.seen.clear()
    stock, ours = Stack(), Stack()
    run_experts_beside_mlp(ours.layers)
    assert all(type(layer) is ConcurrentLayer for layer in ours.layers)
    return stock, ours


@torch.no_grad()
def test_a_layer_with_late_experts_equals_the_stock_layer(stacks: tuple[Stack, Stack]) -> None:
    stock, ours = stacks
    states = torch.randn(TOKENS, HIDDEN)
    assert torch.equal(ours(states), stock(states))
    assert late.awaited == 3 and not late.begun


@torch.no_grad()
def test_routers_read_the_weights_of_their_step(stacks: tuple[Stack, Stack]) -> None:
    """They are loaded after the layers were changed. Hooks of a router's product note logits."""
    states, noted = torch.randn(TOKENS, HIDDEN), []
    for stack in stacks:
        for number, layer in enumerate(stack.layers):
            torch.manual_seed(number)
            layer.router.proj.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
            layer.router.scale.copy_(torch.rand(HIDDEN))
            layer.router.proj.register_forward_hook(lambda *call: noted.append(call[-1][0]))
        stack(states)
    assert len(noted) == 6
    for expected, found in zip(noted[:3], noted[3:], strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_compiler_keeps_the_order_and_has_no_more_to_launch(stacks: tuple[Stack, Stack]) -> None:
    """The result is the same, the whole dense half is launched behind the experts, the router's
    product is not among what is compiled, and nothing is copied or computed apart for that."""
    states = torch.randn(TOKENS, HIDDEN)
    found, kernels, products = {}, {}, {}
    of_experts, of_await = (
        rf"torch\.ops\.vllm\.{name}\.default\((.*?)\)"
        for name in ("vllm_dllm_test_experts", "vllm_dllm_await_experts")
    )
    for name, layers in zip(("stock", "ours"), stacks, strict=True):
        metrics.reset()
        late.seen.clear()
        options = {
            **IN_ORDER,
            SETTING: RowsInRegisters,
            "enable_auto_functionalized_v2": False,
        }  # as vLLM compiles
        with torch.compiler.config.patch(force_disable_caches=True):  # or nothing is counted
            compiled = torch.compile(layers, fullgraph=True, options=options)
            found[name], (code,) = run_and_get_code(compiled, states)
        kernels[name], products[name] = metrics.generated_kernel_count, code.count(".mm(")
    allowed = tolerances.within(tolerances.model(3, 2 * HIDDEN, logits=1.0))
    torch.testing.assert_close(found["ours"], found["stock"], **allowed)
    assert late.seen == 6 * [True] and late.awaited == 3
    assert kernels["ours"] == kernels["stock"] > 0
    assert products["ours"] == products["stock"] - 3 == 3
    read, kept = (re.findall(pattern, code) for pattern in (of_experts, of_await))
    assert len(read) == len(kept) == 3
    for inputs, awaited in zip(read, kept, strict=True):
        rows, router_rows, _ = inputs.split(", ")
        assert {rows, router_rows} < set(awaited.split(", ")), "their memory may be reused"


@torch.no_grad()
def test_padded_rows_are_not_left_to_the_second_stream(stacks: tuple[Stack, Stack]) -> None:
    """Nobody would keep them until they are awaited."""
    stock, ours = stacks
    for layer in ours.layers:
        del layer.experts._forward_impl  # a real one would run at once
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
        (
            True,
            "first records, second waits, second projects, second runs logits, second records, "
            "first waits",
        ),
        (False, "first runs routing"),
    ],
)
def test_experts_that_are_awaited_run_on_the_second_stream(
    notes: list[str], is_awaited: bool, expected: str
) -> None:
    beside = concurrent_experts._SecondStream()

    def run(states: str, logits: str, *others: None) -> str:
        assert others == (None, None)
        notes.append(f"{Stream.current.name} runs {logits}")
        return states

    def project(rows: str) -> tuple[str, None]:
        assert rows == "routing"
        notes.append(f"{Stream.current.name} projects")
        return "logits", None

    for layer in [beside.wrap(run, project) for _ in range(2)]:
        if is_awaited:
            beside.begin()
        assert layer("states", "routing", None, None) == "states"
        beside.wait()
    assert notes == 2 * expected.split(", ")


def test_a_graph_of_other_layers_is_not_run() -> None:
    """Its layers would take the router's rows for logits."""
    with pytest.raises(AssertionError, match="other layers"):
        concurrent_experts._SecondStream().begin()


INNER, OUTER = ReductionHint.INNER, ReductionHint.OUTER


def features(length: int, hint: ReductionHint) -> SIMDKernelFeatures:
    kernel = SIMDKernelFeatures([], sympy.Symbol("rows"), sympy.Integer(length))
    kernel.get_reduction_hint = lambda *_: hint
    return kernel


@pytest.mark.parametrize(
    ("length", "hint", "ours", "inductor_s"),
    [
        (1024, INNER, True, True),
        (2816, INNER, True, False),
        (4096, INNER, True, False),
        (8192, INNER, False, False),
        (2816, OUTER, False, False),  # columns: a block would hold several
    ],
)
def test_rows_that_fit_registers(
    length: int, hint: ReductionHint, ours: bool, inductor_s: bool
) -> None:
    graph = SimpleNamespace(sizevars=SizeVarAllocator())
    with V.set_graph_handler(graph):
        for choices, expected in ((RowsInRegisters(), ours), (InductorChoices(), inductor_s)):
            found = choices.should_use_persistent_reduction(features(length, hint), False)
            assert found == expected


@pytest.fixture
def before() -> Iterator[InductorChoices]:
    """The choices of an earlier compilation in this thread."""
    earlier = InductorChoices()
    with V.set_choices_handler(earlier):
        yield earlier


def config(**settings: Any) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config=settings))


def test_an_earlier_compilation_does_not_keep_its_choices(
    before: InductorChoices, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config()
    read_rows_once(given)
    assert V.choices is before, "on a CPU"
    monkeypatch.setattr(row_reductions, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    read_rows_once(given)
    assert isinstance(V.choices, RowsInRegisters)
    settings = given.compilation_config.inductor_compile_config
    assert settings == {SETTING: RowsInRegisters}
    # vLLM's and Inductor's keys know a graph that was compiled so.
    assert normalize_value(settings) != normalize_value({})
    plain = torch._inductor.config.save_config_portable()
    with torch._inductor.config.patch(settings):
        assert torch._inductor.config.save_config_portable() != plain


def test_a_user_s_choices_stay(before: InductorChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reductions, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    given = config(inductor_choices_class=InductorChoices)
    read_rows_once(given)
    assert V.choices is before
    with torch._inductor.config.patch("triton.persistent_reductions", False):
        graph = SimpleNamespace(sizevars=SizeVarAllocator())
        with V.set_graph_handler(graph):
            row = features(2816, INNER)
            assert not RowsInRegisters().should_use_persistent_reduction(row, False)
