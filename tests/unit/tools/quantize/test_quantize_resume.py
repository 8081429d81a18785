"""`vllm-dllm quantize` goes on where it was interrupted, to the same bytes."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import DiffusionGemmaForBlockDiffusion

from tests.unit.tools.quantize.quantized_files import files
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import save_tensors
from vllm_dllm.tools.quantize import quantize as quantize_module
from vllm_dllm.tools.quantize.quantize import quantize


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


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.copyfile"}


class InterruptedWrites:
    """Ends a program at the next file operation in `folder` after `left` ones; Python tells its
    audit hooks of each before it happens."""

    def __init__(self) -> None:
        self.folder, self.left = "", sys.maxsize
        sys.addaudithook(self._hook)  # for good: hooks cannot be removed

    def arm(self, folder: Path, left: int) -> None:
        self.folder, self.left = str(folder), left

    def disarm(self) -> None:
        self.left = sys.maxsize

    def _hook(self, event: str, args: tuple) -> None:
        if self.left == sys.maxsize:
            return
        writes = event in WRITES or (event == "open" and "w" in str(args[1]))
        if writes and any(str(arg).startswith(self.folder) for arg in args):
            self.left -= 1
            if self.left < 0:
                raise Interruption


@pytest.mark.slow
def test_goes_on_from_every_file_operation(checkpoint, prompts, fp4, tmp_path, monkeypatch):
    """Those from the first shard on are each the last one of some run; nothing is computed twice
    by the run that follows."""
    out, partial, before = (tmp_path / name for name in ("out", "out.partial", "before"))
    with monkeypatch.context() as patch:
        patch.setattr(quantize_module, "save_tensors", interrupt_after(2, save_tensors))
        with pytest.raises(Interruption):
            quantize(checkpoint, "nvfp4", out, prompts)
    partial.rename(before)
    monkeypatch.setattr(quantize_module, "_find_weight_amax", never)
    monkeypatch.setattr(DiffusionGemmaForBlockDiffusion, "from_pretrained", never)
    states, interrupted = [], InterruptedWrites()
    for count in range(100):
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(before, partial)
        interrupted.arm(tmp_path, count)
        try:
            quantize(checkpoint, "nvfp4", out, prompts)
            break
        except Interruption:
            states.append(out.exists())
        finally:
            interrupted.disarm()
        quantize(checkpoint, "nvfp4", out, prompts)
        assert files(out) == files(fp4) and not partial.exists(), f"after {count} operations"
    assert states.count(False) > 10  # files, index, config.json, and their renaming
    assert states.count(True) == 3  # two files of ranges, and what says which run it was
    with pytest.raises(InputError, match="out exists already"):
        quantize(checkpoint, "nvfp4", out, prompts)
