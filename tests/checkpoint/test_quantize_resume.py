"""`vllm-dllm quantize` goes on where it was interrupted, to the same bytes."""

import json
from collections.abc import Callable

import pytest
from safetensors.torch import save_file
from transformers import DiffusionGemmaForBlockDiffusion

from tests.checkpoint.quantized_files import files
from vllm_dllm.checkpoint import quantize as quantize_module
from vllm_dllm.checkpoint.quantize import quantize
from vllm_dllm.errors import InputError


class Interruption(Exception):
    pass


def interrupt_after(calls: int, function: Callable) -> Callable:
    """`function`, which the call after `calls` ends."""
    made = 0

    def wrapped(*args, **kwargs):
        nonlocal made
        made += 1
        if made > calls:
            raise Interruption
        return function(*args, **kwargs)

    return wrapped


def never(*args, **kwargs):
    raise AssertionError("this was done before the interruption")


def test_goes_on_at_the_shard_it_was_interrupted_at(
    checkpoint, prompts, fp4, tmp_path, monkeypatch
):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with monkeypatch.context() as patch:
        patch.setattr(quantize_module, "save_file", interrupt_after(1, save_file))
        with pytest.raises(Interruption):
            quantize(checkpoint, "nvfp4", out, prompts)
    assert not out.exists()
    first = partial / "model-00001-of-00003.safetensors"
    assert list(partial.glob("*.safetensors")) == [first]
    written_at = first.stat().st_mtime_ns
    with monkeypatch.context() as patch:  # neither weights nor activations are looked at again
        patch.setattr(quantize_module, "_weight_amax", never)
        patch.setattr(DiffusionGemmaForBlockDiffusion, "from_pretrained", never)
        quantize(checkpoint, "nvfp4", out, prompts)
    assert (out / first.name).stat().st_mtime_ns == written_at
    assert files(out) == files(fp4) and not partial.exists()


def test_goes_on_at_the_prompt_it_was_interrupted_at(
    checkpoint, prompts, fp4, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    generate = DiffusionGemmaForBlockDiffusion.generate
    with monkeypatch.context() as patch:
        patch.setattr(DiffusionGemmaForBlockDiffusion, "generate", interrupt_after(2, generate))
        with pytest.raises(Interruption):
            quantize(checkpoint, "nvfp4", out, prompts)
    results = json.loads((tmp_path / "out.partial" / "input_ranges.json").read_text())
    assert results["done"] == 2 and not out.exists()
    with monkeypatch.context() as patch:  # one prompt is left
        patch.setattr(DiffusionGemmaForBlockDiffusion, "generate", interrupt_after(1, generate))
        quantize(checkpoint, "nvfp4", out, prompts)
    assert files(out) == files(fp4)


def test_does_not_go_on_with_another_run(checkpoint, prompts, tmp_path, monkeypatch):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    monkeypatch.setattr(quantize_module, "save_file", interrupt_after(1, save_file))
    with pytest.raises(Interruption):
        quantize(checkpoint, "fp8-dynamic", out)
    before = files(partial)
    with pytest.raises(InputError, match=r"out\.partial is left from a run with another"):
        quantize(checkpoint, "nvfp4", out, prompts)
    assert files(partial) == before and not out.exists()
