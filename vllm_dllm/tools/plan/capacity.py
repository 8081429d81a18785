"""What `vllm-dllm plan` prints: where a GPU's memory goes, how many requests it holds."""

import math
from dataclasses import dataclass
from pathlib import Path

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.step_sizes import canvases_at_once
from vllm_dllm.errors import InputError
from vllm_dllm.tools.plan import ELEMENT_BYTES, GPUS
from vllm_dllm.tools.plan.shape import read_shape

GIB = 1 << 30
MIB = 1 << 20


USED = 0.92  # of the memory: vLLM's --gpu-memory-utilization
WORKSPACE_GIB = 3.0
"""Assumed for activations, CUDA graphs and libraries. vLLM measures it when it starts."""
BLOCK_SIZE = 16  # tokens: vLLM's on GPUs
TOKEN_BUDGET = 8192  # of a step: vLLM's on GPUs of this size


@dataclass(frozen=True)
class Plan:
    """All sizes in bytes, on each GPU."""

    memory: int
    weights: int
    workspace: int
    sampling: int
    state: int  # of a request
    kv: int  # of a request
    in_a_step: int  # canvases that one step denoises
    longest: int  # tokens of a request, by the checkpoint
    is_26b: bool  # of the shape that figures are published for

    @property
    def left(self) -> int:
        """What is left for requests."""
        return self.memory - self.weights - self.workspace - self.sampling

    @property
    def num_requests(self) -> int:
        """How many requests memory has room for."""
        return max(0, self.left // (self.kv + self.state))


def make(
    checkpoint: Path,
    memory_gib: float,
    context: int,
    ranks: int,
    kv_cache_dtype: str,
    most_images: int | None = None,  # of a prompt; None: any number
) -> Plan:
    """Adds up sizes. Raises InputError when the checkpoint cannot be read, or a number makes no
    sense."""
    for name, number in (("--context", context), ("--tensor-parallel-size", ranks)):
        if number < 1:
            raise InputError(f"{name} must be at least 1, got {number}")
    if not 0 < memory_gib < math.inf:
        raise InputError(f"--memory-gib must be greater than 0, got {memory_gib}")
    shape = read_shape(checkpoint, most_images)
    return Plan(
        memory=int(USED * memory_gib * GIB),
        weights=shape.weight_bytes // ranks,
        workspace=int(WORKSPACE_GIB * GIB),
        sampling=ExtensionConfig().sampling_memory_mib * MIB,
        state=shape.state_bytes(),
        kv=shape.kv_bytes(context, ELEMENT_BYTES[kv_cache_dtype], ranks, BLOCK_SIZE),
        in_a_step=canvases_at_once(TOKEN_BUDGET, shape.canvas_length),
        longest=shape.max_position_embeddings,
        is_26b=(len(shape.layers), shape.hidden_size) == (30, 2816),
    )


def show(
    checkpoint: Path,
    gpu: str,
    memory_gib: float | None,
    context: int,
    ranks: int,
    kv_cache_dtype: str,
    most_images: int | None,
) -> None:
    """Prints the plan. Raises InputError as `make` does, and where the weights do not fit."""
    if memory_gib is None:
        memory_gib = GPUS[gpu].memory_gib
    plan = make(checkpoint, memory_gib, context, ranks, kv_cache_dtype, most_images)
    if plan.left <= 0:
        raise InputError(
            f"the weights take {plan.weights / GIB:.1f} of the {plan.memory / GIB:.1f} GiB that "
            f"vLLM uses of each {gpu}, and {WORKSPACE_GIB:g} GiB are needed beside them: raise "
            f"--tensor-parallel-size, or quantise the checkpoint"
        )
    for line in lines(plan, checkpoint.resolve().name, gpu, context, ranks):
        print(line)


def lines(plan: Plan, name: str, gpu: str, context: int, ranks: int) -> list[str]:
    many = f"each of {ranks} {gpu}" if ranks > 1 else f"one {gpu}"
    rows = [
        ("used by vLLM", plan.memory, f"{USED:.0%}: --gpu-memory-utilization"),
        ("  weights", plan.weights, "from the headers of the files"),
        ("  workspace", plan.workspace, "activations, graphs: an assumption"),
        ("  sampling", plan.sampling, "sampling_memory_mib"),
        ("  requests", plan.left, "what is left"),
        ("a request", plan.kv + plan.state, ""),
        ("  keys and values", plan.kv, f"{context:,} tokens"),
        ("  between steps", plan.state, "an embedding per canvas position"),
    ]
    found = [f"{name}, {many}, {context:,} tokens of context per request", ""]
    found += [f"{label:18} {_size(size)}   {why}".rstrip() for label, size, why in rows]
    found += ["", f"Memory has room for {plan.num_requests:,} requests."]
    if context > plan.longest:
        found += [
            f"But the model is for {plan.longest:,} tokens at most (max_position_embeddings in its "
            f"config.json): vLLM refuses --max-model-len {context}."
        ]
    found += [
        f"A step of {TOKEN_BUDGET:,} tokens denoises {plan.in_a_step} canvases: for more at once, "
        f"raise --max-num-batched-tokens and --max-num-seqs."
    ]
    if plan.is_26b and (published := GPUS[gpu].published):
        found += [
            f"Published for stock vLLM, FP8, one request: {published:,} tokens per second. "
            f"vllm-dllm has not been measured on a GPU."
        ]
    return found


def _size(num_bytes: int) -> str:
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")
    return f"{num_bytes / unit:8.2f} {name}"
