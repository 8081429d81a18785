"""Compiles FlashAttention-4 beside torch.compile, and keeps its kernels for later starts, if the
user has FlashAttention-4 keep them (`FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`).

Each kernel takes CuTe's compiler 6 to 10 s. It holds Python's lock meanwhile, so another process
compiles and this one reads what that stored.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from attention_kernels import fa4_ahead
from attention_kernels.fa4_ahead import Step, chip_variables
from vllm_dllm.attention.gpu import GpuCanvasImpl
from vllm_dllm.attention.warm_up import steps_to_try
from vllm_dllm.measured import folder

logger = init_logger(__name__)

HOPPER = (9, 0)  # other chips have no measured times, and so run FlashAttention-4 if told to
KEEPS, KEPT_IN = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
MASKS = Path(fa4_ahead.__file__).with_name("fa4_fwd.py")  # needs FlashAttention-4 to be imported
MOST_SECONDS = 300  # for all kernels


@dataclass
class Compiler:
    """A process that compiles FlashAttention-4."""

    process: subprocess.Popen[bytes]
    partial: Path  # where it stores kernels
    kept: Path  # where they belong
    done: Path  # says that they are there

    def wait(self) -> None:
        """Waits for the process and moves its kernels to where FlashAttention-4 looks for them,
        each file at once. If it failed, logs a warning: the kernels are then compiled here.
        Repeatable."""
        if not self.partial.exists():
            return
        try:
            status: int | str = self.process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = f"after {MOST_SECONDS} s"
        try:
            if status != 0:
                logger.warning("FlashAttention-4 was not compiled ahead (ended: %s).", status)
                return
            for file in self.partial.rglob("*.o"):
                target = self.kept / file.relative_to(self.partial)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
            self.done.touch()
            logger.info("FlashAttention-4 was compiled while the server started.")
        except OSError as error:
            logger.warning("Cannot keep FlashAttention-4 in %s: %s.", self.kept, error)
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)


def compile_ahead(
    vllm_config: VllmConfig,
    layers: Iterable[Any],  # of the model; other layers are ignored
    has_images: bool,  # whether requests may have some
) -> Compiler | None:
    """Has FlashAttention-4 keep its kernels in a folder, and starts to compile those that `layers`
    run. Called before FlashAttention-4 is imported. Of several ranks only the first compiles ahead
    and waits; at a first start the others compile for themselves.

    Returns None if the kernels are there or none is needed, on another chip than Hopper, and unless
    the user has set `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`.

    The folder is of this model and kind of server alone, whatever
    `FLASH_ATTENTION_CUTE_DSL_CACHE_DIR` says: FlashAttention-4 does not tell a kernel with causal
    flags from one without.
    """
    if vllm_config.diffusion_config is None:
        return None
    capability = current_platform.get_device_capability()
    if os.environ.get(KEEPS) != "1" or capability is None or tuple(capability) != HOPPER:
        return None
    steps = _steps(vllm_config, layers, has_images)
    if not steps:
        return None
    # FlashAttention-4 knows a mask by its own text, and not by what it calls.
    masks = hashlib.sha256(MASKS.read_bytes()).hexdigest()[:16]
    kept = folder.result_folder(vllm_config) / f"flash_attention_4-{masks}"
    steps_json = json.dumps([list(step) for step in steps])
    done = kept / f"{hashlib.sha256(steps_json.encode()).hexdigest()[:16]}.done"
    partial = None
    try:
        if not done.exists():
            kept.mkdir(parents=True, exist_ok=True)
            if get_tp_group().is_first_rank:
                partial = Path(tempfile.mkdtemp(dir=kept, prefix="partial-"))
    except OSError as error:
        logger.warning("Cannot keep FlashAttention-4 in %s: %s. It is compiled here.", kept, error)
        os.environ[KEEPS] = "0"  # its own folder may have kernels without flags by the same names
        return None
    os.environ[KEPT_IN] = str(kept)
    if partial is None:
        return None
    return Compiler(_start_process(steps_json, partial), partial, kept, done)


def _start_process(steps_json: str, folder: Path) -> subprocess.Popen[bytes]:
    """Starts `attention_kernels.fa4_ahead`, which compiles the steps and stores the kernels in
    `folder`."""
    chip = chip_variables(HOPPER, current_platform.num_compute_units())
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), KEPT_IN: str(folder)}
    forward = "vllm.vllm_flash_attn:flash_attn_varlen_func"
    return subprocess.Popen(
        [
            *(sys.executable, "-W", "ignore", "-m", "attention_kernels.fa4_ahead"),
            *(forward, steps_json, str(os.getpid())),
        ],
        env={**os.environ, **chip, **paths},
        stdin=subprocess.DEVNULL,
    )


def _steps(vllm_config: VllmConfig, layers: Iterable[Any], has_images: bool) -> list[Step]:
    """Returns the steps of `warm_up` that run FlashAttention-4, once each."""
    most_rows = vllm_config.scheduler_config.max_num_batched_tokens
    impls = (getattr(layer, "impl", None) for layer in layers)
    steps = {
        _describe_step(vllm_config, impl, num_reqs, length, images)
        for impl in impls
        if isinstance(impl, GpuCanvasImpl) and impl.fa4 is not None
        for num_reqs, length in steps_to_try(impl.choice, most_rows)
        if impl.choice.version_for(num_reqs * length) == "fa4"
        for images in {False, has_images}
        if impl.fa4.can_run(images, by_blocks=False)
    }
    return sorted(steps)


def _describe_step(
    vllm_config: VllmConfig, impl: GpuCanvasImpl, num_reqs: int, length: int, has_images: bool
) -> Step:
    """Returns what decides which kernel of FlashAttention-4 a layer runs in a step of `num_reqs`
    requests with `length` queries each."""
    assert impl.fa4 is not None
    model = vllm_config.model_config
    return Step(
        by_flags=impl.fa4.uses_flags(has_images),
        has_images=has_images,
        num_reqs=num_reqs,
        query_len=length,
        longest=max(model.max_model_len, length),
        head_size=impl.head_size,
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        block_size=vllm_config.cache_config.block_size,
        window_left=impl.sliding_window[0],
        softcap=impl.logits_soft_cap,
        dtype=str(model.dtype).removeprefix("torch."),
    )
