"""The 26B model's widths, one layer of each kind, in bf16: a denoising step is transformers',
behind contexts of up to 64k tokens. Six minutes of a core, and 19 GiB. Where there is a GPU, both
run there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from bench.dummy_checkpoint import SHAPE_26B
from checkpoints.recipes.architecture import build_config, build_generation_config
from checkpoints.recipes.checkpoint import save_checkpoint
from checkpoints.recipes.tiny import randomize_weights
from checkpoints.recipes.tokenizer import build_tokenizer
from tests import tolerances
from tests.engine import known_context
from tests.engine.conftest import Engine, GetEngine
from tests.engine.one_step import random_ids, read_one_step

pytestmark = [pytest.mark.numerics, pytest.mark.thorough]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CANVAS, BLOCK = 256, 128
LENGTHS = [20, 1_500, 8_192, 65_536]
"""Of prompts: within the window of 1,024 tokens and behind it."""
LAYER_TYPES = ["sliding_attention", "full_attention"]
TOKENS = 20
"""The likeliest of each position, which are compared."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4.7 GB of random weights. Scores of attention are about 1 apart, as trained weights have
    them, where norms of size 1 would make rounding decide."""
    path = tmp_path_factory.mktemp("full-width")
    shape = {name: size for name, size in SHAPE_26B.items() if name != "num_hidden_layers"}
    config = build_config(
        **shape, layer_types=LAYER_TYPES, canvas_length=CANVAS, max_position_embeddings=131_072
    )
    with DEVICE:
        model = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=torch.bfloat16)
    randomize_weights(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.mul_(len(parameter) ** -0.5)
    model.generation_config = build_generation_config()
    save_checkpoint(model, build_tokenizer(), path)
    return path


def prompt_of(length: int) -> tuple[list[int], list[int]]:
    """With its canvas."""
    vocab_size = SHAPE_26B["vocab_size"]
    return random_ids(length, vocab_size, length), random_ids(CANVAS, vocab_size, length + 1)


@dataclass
class Step:
    """What a canvas' first denoising step computed."""

    log_probs: torch.Tensor  # [C, V] of the reference, [C, TOKENS] of ours
    routed: list[torch.Tensor]  # of each layer: logits [C, experts] fp32

    def experts(self) -> torch.Tensor:
        """[layers, C, experts] bool: those that are chosen."""
        logits = torch.stack(self.routed)
        chosen = logits.topk(SHAPE_26B["top_k_experts"]).indices
        return torch.zeros(logits.shape, dtype=torch.bool).scatter(-1, chosen, True)


@contextmanager
def noting_routers(
    model: torch.nn.Module, layers: str, name: str, noted: dict[int, torch.Tensor]
) -> Iterator[None]:
    """The last canvas' logits, by layer."""

    def note(number: int, _: object, __: object, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        noted[number] = logits.flatten(0, -2)[-CANVAS:].float().cpu()

    hooks = [
        model.get_submodule(f"{layers}.{number}.router{name}").register_forward_hook(
            partial(note, number)
        )
        for number in range(len(LAYER_TYPES))
    ]
    yield
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def expected(path: Path, dtype: torch.dtype) -> dict[int, Step]:
    """Transformers', by length of the prompt."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()
    model.to(DEVICE)
    found = {}
    for length in LENGTHS:
        prompt, canvas = prompt_of(length)
        known = known_context.num_known(length, BLOCK)
        noted: dict[int, torch.Tensor] = {}
        with noting_routers(model, "model.decoder.layers", ".proj", noted):
            cache = known_context.reference_cache(model.config.text_config, known, dtype, DEVICE)
            logits = model(
                input_ids=torch.tensor([prompt[known:]], device=DEVICE),
                past_key_values=cache,
                decoder_input_ids=torch.tensor([canvas], device=DEVICE),
            ).logits
        found[length] = Step(logits[0].log_softmax(-1).cpu(), list(noted.values()))
    return found


def computed(served: Engine, length: int) -> tuple[torch.Tensor, Step]:
    """And the tokens [C, TOKENS] that its log-probabilities are of."""
    prompt, canvas = prompt_of(length)
    noted: dict[int, torch.Tensor] = {}
    runner = served.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model = runner.model_runner.model
    with noting_routers(model, "model.layers", ".proj", noted):
        (positions,) = read_one_step(served, [prompt], [canvas], num_logprobs=TOKENS)
    tokens = torch.tensor([list(scores)[:TOKENS] for scores in positions])
    log_probs = torch.tensor([list(scores.values())[:TOKENS] for scores in positions])
    return tokens, Step(log_probs, list(noted.values()))


def test_one_step(checkpoint: Path, engine: GetEngine) -> None:
    """Of the rows that all send to the same experts: off by what rounding to bf16 allows, and no
    more than transformers in bf16 is. Rounding decides where scores of experts are close."""
    exact, rounded = (expected(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    served = engine(
        checkpoint,
        dtype="bfloat16",
        max_model_len=max(LENGTHS) + CANVAS,
        max_num_batched_tokens=2_048,
        block_size=BLOCK,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2 << 30,
        kv_transfer_config=known_context.OPTIONS,
        **({"gpu_memory_utilization": 0.25} if DEVICE.type == "cuda" else {}),
    )
    for length, truth in exact.items():
        tokens, ours = computed(served, length)
        theirs = Step(rounded[length].log_probs.gather(1, tokens), rounded[length].routed)
        same = torch.ones(CANVAS, dtype=torch.bool)
        for step in (ours, theirs):
            same &= ~(step.experts() != truth.experts()).any(-1).any(0)
        off, theirs_off = (
            ((step.log_probs - truth.log_probs.gather(1, tokens)).square().mean(1).sqrt())
            / truth.log_probs.std(1)
            for step in (ours, theirs)
        )
        print(
            f"{length} tokens: {same.sum()} of {CANVAS} rows, off by {off[same].mean():.2e} on "
            f"average, {off[same].max():.2e} at most; transformers in bf16 by "
            f"{theirs_off[same].mean():.2e} and {theirs_off[same].max():.2e}"
        )
        assert same.float().mean() >= tolerances.ROWS_OF_SAME_EXPERTS
        assert off[same].max() <= tolerances.ROW_OF_BF16_LOGITS
        assert off[same].mean() <= tolerances.BESIDE_BF16 * theirs_off[same].mean()
