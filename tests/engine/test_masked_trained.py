"""The trained masked checkpoint decodes as the published loop does, and is right."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM
from vllm import SamplingParams

from tests.engine import quantized
from tests.engine.conftest import HELD_OUT, GetEngine, chat_tokens
from tests.engine.masked import Reference, Rule
from tests.paths import CHECKPOINTS
from vllm_dllm.models.masked_configs import SDARConfig
from vllm_dllm.tools.quantize.quantize import quantize

pytestmark = pytest.mark.numerics

SDAR = CHECKPOINTS / "sdar-tiny"
THRESHOLD, MOST_TOKENS = 0.9, 128


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    model = Qwen3ForCausalLM._from_config(
        SDARConfig.from_pretrained(SDAR), attn_implementation="eager"
    )
    model.load_state_dict(load_file(SDAR / "model.safetensors"), strict=False)
    return model.float().eval()


@pytest.mark.parametrize(("block_length", "stride"), [(4, 23), (32, 23)])
def test_trajectories_and_answers(
    engine: GetEngine, model: torch.nn.Module, block_length: int, stride: int
) -> None:
    """Tokens are revealed in the same steps, except where a probability is so close to the
    threshold that rounding decides; so answers are compared, and how many of them are right."""
    served = engine(SDAR, hf_overrides={"block_size": block_length})
    rows = HELD_OUT[::stride]
    tokenizer = served.llm.get_tokenizer()
    prompts = [chat_tokens(tokenizer, row["messages"]) for row in rows]
    params = SamplingParams(
        max_tokens=MOST_TOKENS,
        temperature=0.0,
        extra_args={"diffusion_accept_probability": THRESHOLD},
    )
    outputs = served.ask(prompts, params)
    decode = Reference(model, block_length, SDARConfig.from_pretrained(SDAR).mask_token_id)
    rule, right = Rule("dynamic", threshold=THRESHOLD), 0
    for row, prompt, output in zip(rows, prompts, outputs, strict=True):
        ours = list(output.outputs[0].token_ids)
        assert ours == decode.generate(prompt, len(ours), rule).tokens
        right += output.outputs[0].text == row["answer"]
    assert right >= 0.9 * len(rows)


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "int8", "w4a16"])
def test_a_quantised_copy(engine: GetEngine, tmp_path: Path, scheme: str) -> None:
    """Made by `vllm-dllm quantize`; it answers as the original does."""
    copy = tmp_path / "copy"
    quantize(SDAR, scheme, copy, None)
    if (served := quantized.started(engine, copy, scheme)) is None:
        return
    rows = HELD_OUT[::25]
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS)
    outputs = served.llm.chat([row["messages"] for row in rows], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    right = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True))
    print(f"{scheme}: {right} of {len(rows)}")
    assert right >= 0.9 * len(rows)
