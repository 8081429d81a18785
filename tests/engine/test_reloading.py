"""vLLM's `reload_weights`: an engine answers as one that was started with these weights does.

On CPUs kernels pack copies of the weights, the LM head has the embeddings' weights, and quantised
layers keep numbers worked out of theirs. Caches have keys, and rows of images, of the old ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.engine import quantized
from tests.engine.conftest import Engine, cached_tokens
from tests.engine.images import random_prompt
from tests.engine.one_step import FEW_STEPS, engine_input

# The longest takes several blocks of the prefix cache.
PROMPTS = [random_prompt(Path(), [length], seed) for seed, length in enumerate((3, 40, 300))]
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "block_size": 16}
thorough = pytest.mark.thorough


def answers(served: Engine, seeing: Path) -> list[list[int]]:
    """Of two blocks each; the second one sees the first one's keys. `seeing`: a checkpoint with the
    settings of images."""
    prompts = [engine_input(p) for p in (*PROMPTS, random_prompt(seeing, [3, 5], seed=2))]
    params = [
        SamplingParams(max_tokens=48, seed=i, ignore_eos=True, extra_args=FEW_STEPS)
        for i in range(len(prompts))
    ]
    outputs = served.llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def reload(served: Engine, checkpoint: Path | None = None) -> None:
    options = {} if checkpoint is None else {"weights_path": str(checkpoint)}
    served.llm.collective_rpc("reload_weights", kwargs=options)


@pytest.fixture(scope="module")
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Two of the same form with other weights; its parameter is their format."""
    made = []
    for seed in (0, 1):
        path = tmp_path_factory.mktemp(f"weights-{seed}")
        make_tiny_checkpoint(path, seed=seed, sliding_window=64, sees=True)
        if request.param is not None:
            target = tmp_path_factory.mktemp(f"{request.param}-{seed}")
            path = quantized.quantize(path, target, request.param)
        made.append(path)
    return made


@pytest.mark.parametrize(
    ("checkpoints", "options"),
    [
        pytest.param(None, {}, id="fp32"),
        pytest.param("NVFP4", {"dtype": "bfloat16"}, id="nvfp4"),
        pytest.param("FP8_DYNAMIC", {"dtype": "bfloat16"}, id="fp8", marks=thorough),
        pytest.param(None, {"dtype": "bfloat16"}, id="bf16", marks=thorough),
        pytest.param(None, {"enforce_eager": False}, id="compiled", marks=thorough),
    ],
    indirect=["checkpoints"],
)
def test_answers_are_those_of_the_weights(
    engine: Callable[..., Engine], checkpoints: list[Path], options: dict[str, Any]
) -> None:
    first, second = checkpoints
    served = engine(first, **{**OPTIONS, **options})
    of_first = answers(served, first)
    reload(served)
    assert answers(served, first) == of_first
    served = engine(second, **{**OPTIONS, **options})
    of_second = answers(served, first)
    assert all(a != b for a, b in zip(of_first, of_second, strict=True))
    reload(served, first)
    assert cached_tokens(served, PROMPTS[2]) == 0  # keys of the weights that are gone
    assert answers(served, first) == of_first
    reload(served)  # the path that was loaded last
    assert answers(served, first) == of_first
    reload(served, second)
    assert answers(served, first) == of_second


@pytest.mark.parametrize("checkpoints", [None], indirect=True)
def test_in_the_middle_of_answers(engine: Callable[..., Engine], checkpoints: list[Path]) -> None:
    """Running requests end, with all their tokens; later ones know nothing of them."""
    first, second = checkpoints
    served = engine(second, **OPTIONS)
    reload(served, second)
    expected = answers(served, first)
    reload(served, first)
    core = served.llm.llm_engine
    params = SamplingParams(max_tokens=48, seed=5, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(f"running-{i}", {"prompt_token_ids": prompt}, params)
    for _ in range(3):
        core.step()
    reload(served, second)
    done = {}
    while core.has_unfinished_requests():
        done |= {out.request_id: out for out in core.step() if out.finished}
    assert [len(out.outputs[0].token_ids) for out in done.values()] == [48] * len(PROMPTS)
    assert answers(served, first) == expected


@pytest.mark.parametrize("checkpoints", [None], indirect=True)
def test_weights_that_do_not_fit(
    engine: Callable[..., Engine], checkpoints: list[Path], tmp_path: Path
) -> None:
    """The model keeps those that it has, whatever had been loaded when the error was found."""
    first, second = checkpoints
    served = engine(second, **OPTIONS)
    reload(served, first)
    expected = answers(served, first)
    weights = load_file(second / "model.safetensors")
    del weights["model.decoder.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for model\.decoder\.norm\.weight"):
        reload(served, tmp_path)
    assert answers(served, first) == expected
    weights["model.decoder.norm.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"its shape must be .* those of {first} again"):
        reload(served, tmp_path)
    assert answers(served, first) == expected


@pytest.mark.parametrize("checkpoints", [None], indirect=True)
def test_kernel_format_is_refused(engine: Callable[..., Engine], checkpoints: list[Path]) -> None:
    served = engine(checkpoints[1], **OPTIONS)
    with pytest.raises(ValueError, match="is_checkpoint_format must be true on CPUs"):
        served.llm.collective_rpc("reload_weights", kwargs={"is_checkpoint_format": False})
