"""LoRA adapters: in a batch of several and none, each request is answered as by the checkpoint that
its adapter is merged into."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests import tolerances
from tests.adapters import Weights, make_adapter
from tests.engine.conftest import Engine, GetEngine, tokens_of
from tests.engine.drafters import TARGET, drafting, started
from tests.engine.masked import Reference, Trajectory
from tests.engine.masked_requests import RULES, VOCABULARY, make, params_of, served
from tests.engine.one_step import is_best_guess, random_ids
from tests.engine.parting import first_parting
from tests.engine.rounding import noisy_model
from tests.engine.test_drafters import chat_prompts
from vllm_dllm.tools.drafter.reference import load_target

pytestmark = pytest.mark.numerics

RANK = 8
LAYERS = {
    "SDAR": "q_proj k_proj v_proj o_proj up_proj down_proj",
    "Nemotron": "q_proj k_proj v_proj o_proj up_proj down_proj",
    "LLaDA2": "query_key_value dense up_proj down_proj",
}
"""Of LLaDA2, those of dense layers and shared experts: routed ones need a GPU."""


@contextmanager
def merged(model: torch.nn.Module, added: Weights) -> Iterator[None]:
    """`model` has the names of transformers."""
    own = {name: weight.data for name, weight in model.named_parameters()}
    before = []
    for name, weight in added.items():
        changed = own[name.replace("encoder.", "model.", 1)]
        before.append((changed, changed.clone()))
        changed += weight
    try:
        yield
    finally:
        for changed, was in before:
            changed.copy_(was)


@pytest.mark.parametrize("family", LAYERS)
def test_mixed_batch_is_answered_as_by_merged_checkpoints(
    engine: GetEngine, tmp_path: Path, family: str
) -> None:
    """The same prompts to all, so that the prefix cache must tell them apart; more requests and
    adapters than a step holds."""
    path, decode = make(tmp_path, family, 4)
    layers = LAYERS[family].split()
    added = [make_adapter(path / f"ad{i}", path, layers, i, RANK) for i in range(3)]
    adapters = [None, *(LoRARequest(f"ad{i}", i + 1, str(path / f"ad{i}")) for i in range(3))]
    prompts = [random_ids(length, VOCABULARY, length) for length in (1, 6, 41, 150)]
    asked = [(prompt, which) for prompt in prompts for which in range(len(adapters))]
    rule, max_tokens = RULES["dynamic"], 24
    model = engine(path, enable_lora=True, max_lora_rank=RANK, max_loras=2, max_cpu_loras=3)
    outputs = model.llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in asked],
        [params_of(rule, max_tokens, 0)] * len(asked),
        lora_request=[adapters[which] for _, which in asked],
        use_tqdm=False,
    )
    same = 0
    for (prompt, which), ours in zip(asked, served(model, outputs), strict=True):
        with merged(decode.model, added[which - 1] if which else {}):
            theirs = decode.generate(prompt, max_tokens, rule)
            parting = first_parting(ours.steps, theirs.steps)
            if parting is not None:
                assert rounding_decides(decode, prompt, max_tokens, theirs, parting)
            same += parting is None
    assert same >= tolerances.DECIDED * len(asked)
    make_adapter(path / "head", path, ["lm_head", "diffusion_head"], 9, RANK)
    with pytest.raises(ValueError, match=r"received .*lm_head"):
        model.llm.llm_engine.add_lora(LoRARequest("head", 9, str(path / "head")))


def answers(
    model: Engine, prompt: list[int], adapters: list[LoRARequest], max_tokens: tuple[int, ...]
) -> list[list[int]]:
    """One with each of the adapters, at once."""
    params = [params_of(RULES["static"], most, 0) for most in max_tokens]
    return list(map(tokens_of, model.ask([prompt] * len(params), params, lora_request=adapters)))


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens"),
    [
        pytest.param(6, (24, 24, 24), id="canvas in the prompt's block"),
        pytest.param(8, (2, 24, 24), id="few tokens"),  # in flight: vLLM takes them for the last
    ],
)
def test_no_step_has_more_adapters_than_fit(
    engine: GetEngine,
    tmp_path: Path,
    asynchronous: None,
    prompt_length: int,
    max_tokens: tuple[int, ...],
) -> None:
    """Nor does one behind a step that a running request sat out."""
    path, _ = make(tmp_path, "SDAR", 4)
    for i in range(3):
        make_adapter(path / f"ad{i}", path, LAYERS["SDAR"].split(), i, RANK)
    adapters = [LoRARequest(f"ad{i}", i + 1, str(path / f"ad{i}")) for i in range(3)]
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1, "max_cpu_loras": 3}
    model = engine(path, async_scheduling=True, **lora)
    prompt = random_ids(prompt_length, VOCABULARY, 0)
    alone = [answers(model, prompt, adapters[i : i + 1], max_tokens[i : i + 1]) for i in range(3)]
    assert answers(model, prompt, adapters, max_tokens) == [tokens for (tokens,) in alone]


@pytest.mark.parametrize("in_place", [False, True])
def test_an_adapter_that_is_loaded_anew(engine: GetEngine, tmp_path: Path, in_place: bool) -> None:
    """Under its name, while requests run with the old one: each is answered by its own."""
    path, _ = make(tmp_path, "SDAR", 4)
    for i in range(2):
        make_adapter(path / f"ad{i}", path, LAYERS["SDAR"].split(), i, RANK)
    old, new = (
        LoRARequest("ad", 1 if in_place else i + 1, str(path / f"ad{i}"), load_inplace=in_place)
        for i in range(2)
    )
    model = engine(path, enable_lora=True, max_lora_rank=RANK, max_loras=2)
    prompt = random_ids(6, VOCABULARY, 0)
    # Together first: vLLM's worker has loaded neither.
    together = answers(model, prompt, [old, new, old], (24, 24, 24))
    ((from_old,), (from_new,)) = (answers(model, prompt, [each], (24,)) for each in (old, new))
    assert from_old != from_new
    assert together == [from_old, from_new, from_old]


def rounding_decides(
    decode: Reference, prompt: list[int], max_tokens: int, theirs: Trajectory, parting: int
) -> bool:
    """Whether the reference parts there from itself when its weights are off by several
    roundings."""
    for seed in range(tolerances.NOISES_AT_A_TIE):
        with noisy_model(decode.model, seed):
            noisy = decode.generate(prompt, max_tokens, RULES["dynamic"])
        if first_parting(noisy.steps, theirs.steps) == parting:
            return True
    return False


@torch.no_grad()
def test_drafted_answers_are_those_of_merged_targets(tmp_path: Path) -> None:
    layers = LAYERS["SDAR"].split()
    added = [{}, *(make_adapter(tmp_path / f"ad{i}", TARGET, layers, i, RANK) for i in range(2))]
    adapters = [None, *(LoRARequest(f"ad{i}", i + 1, str(tmp_path / f"ad{i}")) for i in range(2))]
    asked = [(prompt, which) for prompt in chat_prompts()[:4] for which in range(len(adapters))]
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
    with started(drafting(**lora)) as llm:
        outputs = llm.generate(
            [prompt for prompt, _ in asked],
            SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=1),
            lora_request=[adapters[which] for _, which in asked],
            use_tqdm=False,
        )
    target = load_target(TARGET, "cpu")
    for (prompt, which), output in zip(asked, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with merged(target.model, added[which]):
            logits = target.model(torch.tensor([prompt + answer])).logits[0]
        for token, row in zip(answer, logits[len(prompt) - 1 :], strict=False):
            assert is_best_guess(token, row.log_softmax(-1))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(asked)
