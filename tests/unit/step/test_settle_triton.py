"""A step of plain requests, and its self-conditioning, in few launches against the same in
PyTorch's operations, in Triton's interpreter where there is no GPU: what it hands on and what it
leaves in the slots."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from tests.unit.step.batches import canvas_batch, input_batch
from vllm_dllm.config.denoise import DenoiseConfig
from vllm_dllm.config.extension import LoadStage
from vllm_dllm.denoise import draws_triton
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.models.diffusion_gemma import SelfConditioning
from vllm_dllm.requests.ends import EVERY_BLOCK, NO_END
from vllm_dllm.requests.options import parse_keys
from vllm_dllm.step.asked.settings import LoadStages, SlotSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Settling, StepResult
from vllm_dllm.step.slots import CanvasSlots, NewRequest, SlotNumbers
from vllm_dllm.step.uniform import condition_triton, settle_triton
from vllm_dllm.step.uniform.uniform_step import UniformStep

pytestmark = pytest.mark.numerics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
R, C, H, V, STEPS = 12, 24, 4, 100, 6
CONTEXT = 70  # the last of several canvases ends behind it
STOPS = [7, 8]
COLUMN = {name: i for i, name in enumerate(SlotNumbers._fields)}
CONFIG = DenoiseConfig(
    max_denoising_steps=STEPS,
    t_min=0.4,
    t_max=0.8,
    entropy_bound=0.1,
    confidence_threshold=0.05,
    stability_threshold=1,
)
STAGES = (LoadStage(2, stability_threshold=0),)
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "answer only": {"diffusion_judge_answer_only": True},
    "of its own": {"diffusion_entropy_bound": 3.0, "diffusion_confidence_threshold": 0.5},
    "under load": {"diffusion_load_stages": 1},
}


class Step(UniformStep):
    """Without an engine, at the sizes above. Statistics are given."""

    stats: RowStats
    soft_rows: torch.Tensor
    input_batch: Any

    def __init__(self, fuses: bool, spares: bool, joins: bool) -> None:
        self.canvas_length, self.vocab_size = C, V
        self.device, self.fuses = DEVICE, fuses
        canvas = torch.zeros(R, C + 3, dtype=torch.int64, device=DEVICE)[:, :C]
        self.slots = CanvasSlots(canvas, H, torch.float32)
        self._numbers = None
        self.slot_settings = settings = SlotSettings(
            CONFIG, LoadStages(STAGES, DEVICE), R, C, DEVICE
        )
        nothing = SimpleNamespace(
            still_compiling=lambda batch: None,
            cut_answers=lambda batch: (),
            any_in=lambda batch: False,
            find_predicted=lambda batch: None,
            has_pins=lambda batch: False,
            expect_next_blocks=lambda *of_blocks: None,
            report=lambda *of_canvases, **of_step: None,
            are_watching=lambda batch: False,
            count_emitted=lambda *of_blocks: None,
            apply_staged_writes=lambda within_s: None,
        )
        names = "grammars", "first_canvases", "predictions", "logprobs", "observers", "filters"
        self.requests: Any = SimpleNamespace(
            settings=settings,
            joins_commits=joins,
            max_model_len=CONTEXT,
            are_counted=True,
            are_plain=lambda batch: True,
            **dict.fromkeys(names, nothing),
        )
        self.settling = Settling(self.slots, self.requests, spares_last_commit=spares)

    def _wrap_logits(self, *of_step: Any) -> Any:
        return SimpleNamespace(read=lambda temperature, draw: (self.stats, self.soft_rows))

    def admit(self, slot: int, kind: str) -> None:
        extra = dict(REQUESTS[kind])
        temperature = extra.pop("temperature", 1.0)
        params = SamplingParams(temperature=temperature)
        options = parse_keys(extra, {}, None)
        self.requests.settings.add_request(NewRequest(slot, params, options, 20, 20, STEPS))


def step_of(seed: int, slots: list[int], widths: list[int], *flags: bool) -> Step:
    """In the middle of things: canvases that commit, stand still, are sure, near their end, and
    some that the scheduler cut: it did not know yet where they begin."""
    step, generator = Step(*flags), torch.Generator().manual_seed(seed)
    n, numbers = len(slots), step.slots.numbers
    for slot, kind in zip(slots, REQUESTS, strict=False):
        step.admit(slot, kind)
    step.requests.settings.apply_staged_writes()

    def below(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    rows = sum(widths)
    guess = below(20, rows)
    entropy = torch.rand(rows, generator=generator) ** 8 * 3
    for i, slot in enumerate(slots):
        first = sum(widths[:i])
        of_canvas = slice(first, first + widths[i])
        if below(2, 1):
            step.slots.tokens[slot, 0, : widths[i]] = guess[of_canvas]
        if below(2, 1):
            entropy[of_canvas] *= 0.05
        if below(2, 1):
            guess[of_canvas] = guess[of_canvas].clamp(max=6)  # no stop token
        numbers[slot, COLUMN["steps_done"]] = below(STEPS, 1)
        numbers[slot, COLUMN["num_steps"]] = STEPS
        numbers[slot, COLUMN["is_committing"]] = below(3, 1) == 0
        numbers[slot, COLUMN["times_repeated"]] = below(2, 1)
        numbers[slot, COLUMN["noise_key"]] = below(1 << 60, 1)
        numbers[slot, COLUMN["end"]] = (EVERY_BLOCK, 60, NO_END)[int(below(3, 1))]
        numbers[slot, COLUMN["width"]] = min(C, widths[i] + 8 * int(below(4, 1) == 0))
        numbers[slot, COLUMN["fitted_end"]] = (40 + 10 * i, 20, NO_END, NO_END)[int(below(4, 1))]
    entropy[0] = entropy[1]  # a tie
    step.slots.stop_tokens.fill_(-1)
    step.slots.stop_tokens[:, : len(STOPS)] = torch.tensor(STOPS)
    step.slots.num_stops[:] = len(STOPS)
    step.slots.host_numbers[:] = numbers.cpu().numpy()
    step.stats = RowStats(guess, below(20, rows), entropy, -entropy)
    step.stats = RowStats(*(column.to(DEVICE) for column in step.stats))
    step.soft_rows = torch.randn(rows, H, generator=generator).to(DEVICE)
    batch = input_batch(widths, slots)
    batch.seq_lens = torch.tensor([40 + 10 * i for i in range(n)], dtype=torch.int32, device=DEVICE)
    # Later than where any of them ends, as with asynchronous scheduling.
    batch.seq_lens_cpu_upper_bound = torch.full((n,), CONTEXT, dtype=torch.int32)
    step.input_batch = batch
    step.batch = CanvasBatch.build(batch, C, DEVICE)
    return step


def take(step: Step) -> StepResult:
    soft_rows = step.soft_rows
    step.soft_rows = soft_rows.clone()
    return step.advance(step.batch, soft_rows, step.input_batch)


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> None:
    if DEVICE.type == "cpu":
        interpret_kernels(draws_triton, settle_triton, condition_triton)


BATCHES = {
    "side by side": ([3, 4, 5, 6, 7], [C] * 5),
    "anywhere": ([9, 1, 4, 0, 11], [C] * 5),
    "narrow": ([2, 3, 4, 5, 6], [C, 1, 9, C, 16]),
    "one": ([5], [C]),
}


CASES = {name: (name, True, True) for name in BATCHES} | {
    "no joined commits": ("side by side", True, False),
    "no spared commit": ("side by side", False, True),
    "neither": ("side by side", False, False),
}


@pytest.mark.parametrize(("batch", "spares", "joins"), CASES.values(), ids=CASES)
def test_settle(batch: str, spares: bool, joins: bool) -> None:
    seen: dict[str, set[bool]] = {}
    for seed in range(5):
        plain, fused = (step_of(seed, *BATCHES[batch], f, spares, joins) for f in (False, True))
        assert plain.slots.numbers.equal(fused.slots.numbers)
        cut = plain._read_slots(plain.batch, plain.input_batch).cut
        for is_cut in [False] if cut is None else cut.tolist():
            seen.setdefault("is cut", set()).add(is_cut)
        expected, ours = take(plain), take(fused)
        assert ours.best_guess.dtype == ours.emitted.dtype == torch.int32, "the kernel's"
        assert ours.best_guess.equal(expected.best_guess.int())
        assert ours.emitted.equal(expected.emitted.int())
        for name in ("numbers", "tokens", "canvas", "soft_embeds"):
            assert getattr(fused.slots, name).equal(getattr(plain.slots, name)), name
        counted, of_plain = fused.take_numbers(), plain.take_numbers()
        assert counted is not None and of_plain is not None
        assert counted._replace(values=of_plain.values) == of_plain
        torch.testing.assert_close(
            torch.from_numpy(counted.values),
            torch.from_numpy(of_plain.values),
            **tolerances.within(tolerances.total(C)),
        )
        for row in counted.rows():
            seen.setdefault("denoises", set()).add(row.step > 0)
            seen.setdefault("converges", set()).add(row.cause == "converged")
            seen.setdefault("accepts some", set()).add(0 < row.accepted < row.length)
        for emitted in ours.emitted.tolist():
            seen.setdefault("emits", set()).add(emitted > 0)
    if batch != "one":
        assert all(both == {True, False} for both in seen.values()), seen


def alone(i: int, slots: list[int], widths: list[int]) -> Step:
    """A step of canvas i only, of those of `step_of`."""
    step = step_of(3, slots, widths, True, True, True)
    first = sum(widths[:i])
    rows = slice(first, first + widths[i])
    step.stats = RowStats(*(column[rows] for column in step.stats))
    step.soft_rows = step.soft_rows[rows]
    batch = step.input_batch
    vars(batch).update(vars(input_batch(widths[i : i + 1], slots[i : i + 1])))
    batch.seq_lens = batch.seq_lens[i : i + 1]
    step.batch = CanvasBatch.build(batch, C, DEVICE)
    return step


@pytest.mark.parametrize("neighbours", ["plain", "not plain"])
def test_a_canvas_does_not_depend_on_its_neighbours(
    neighbours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which is what a request under load allows.
    monkeypatch.setitem(REQUESTS, "under load", {})
    together = step_of(3, *BATCHES["narrow"], neighbours == "plain", True, True)
    found = take(together)
    for i, slot in enumerate(BATCHES["narrow"][0]):
        one = alone(i, *BATCHES["narrow"])
        assert take(one).best_guess[0].equal(found.best_guess[i].int())
        for name in ("numbers", "tokens", "canvas", "soft_embeds"):
            assert getattr(one.slots, name)[slot].equal(getattr(together.slots, name)[slot]), name


SLOTS, LENGTH, HIDDEN, INTERMEDIATE = 8, 12, 40, 72
CONDITIONED: dict[
    str, tuple[list[int], list[int], list[int]]
] = {  # slots, prompt rows, canvas rows
    "side by side": ([2, 3, 4], [0, 0, 0], [LENGTH, LENGTH, LENGTH]),
    "anywhere": ([6, 0, 5], [0, 0, 0], [LENGTH, LENGTH, LENGTH]),
    "narrow": ([1, 2, 7], [0, 0, 0], [LENGTH, 1, 5]),
    "beside prompts": ([1, 2, 7], [4, 0, 9], [LENGTH, LENGTH, 5]),
}


def conditioning_step(batch: str, fuses: bool) -> UniformStep:
    slots, prompts, canvases = CONDITIONED[batch]
    step = UniformStep.__new__(UniformStep)
    step.fuses = fuses
    step.slots = CanvasSlots(
        torch.zeros(SLOTS, LENGTH, dtype=torch.int64, device=DEVICE), HIDDEN, torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    step.slots.soft_embeds.copy_(torch.randn(SLOTS, LENGTH, HIDDEN, generator=generator))
    step.slots.soft_embeds[slots[1]] = 0  # as on a canvas' first step
    step.slots.numbers[slots[2], SlotNumbers._fields.index("is_committing")] = 1
    with set_current_vllm_config(VllmConfig()), torch.random.fork_rng():
        torch.manual_seed(1)
        module = SelfConditioning(HIDDEN, INTERMEDIATE, eps=1e-6)
    torch.nn.init.normal_(module.pre_norm.weight, generator=generator)
    module.to(DEVICE)
    step.model = SimpleNamespace(self_conditioning=module)
    step.batch = canvas_batch(LENGTH, canvases, slots, prompts, device=DEVICE)
    return step


@pytest.mark.parametrize("batch", CONDITIONED)
def test_condition(batch: str) -> None:
    _, prompts, canvases = CONDITIONED[batch]
    plain = torch.randn(sum(prompts) + sum(canvases), HIDDEN).to(DEVICE)
    expected, ours = torch.full_like(plain, torch.nan), torch.full_like(plain, torch.nan)
    with torch.inference_mode():
        for fuses, out in ((False, expected), (True, ours)):
            step = conditioning_step(batch, fuses)
            step.condition(plain, step.batch, out=out)
    assert (expected == plain).all(dim=1).sum() == sum(prompts) + canvases[2], "a commit's, too"
    assert ours[(expected == plain).all(dim=1)].equal(plain[(expected == plain).all(dim=1)])
    share = tolerances.norm(HIDDEN) + 2 * tolerances.product(INTERMEDIATE)
    torch.testing.assert_close(ours, expected, **tolerances.within(share, size=3.0))
