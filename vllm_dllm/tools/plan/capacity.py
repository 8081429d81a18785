"""What `vllm-dllm plan` prints: where a GPU's memory goes, how many requests it holds. Sizes follow
from a checkpoint's shape: of weights, of what a request keeps, of keys and values."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from vllm_dllm.config.architectures import register_configs
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.step_sizes import max_canvases_per_step
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import read_json, read_shards
from vllm_dllm.tools.plan import ELEMENT_BYTES, GPUS

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
        in_a_step=max_canvases_per_step(TOKEN_BUDGET, shape.canvas_length),
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
    """Puts a plan into the lines that the command prints."""
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
        found += [f"Published for stock vLLM, FP8, one request: {published:,} tokens per second."]
    return found


def _size(num_bytes: int) -> str:
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")
    return f"{num_bytes / unit:8.2f} {name}"


VISION_TOWER = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
MODEL_BYTES = 2  # of an activation, and of an expected embedding: bf16


@dataclass(frozen=True)
class Layer:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    head_size: int
    window: int | None  # tokens; None: full attention

    def bytes_per_token(self, element_bytes: int, ranks: int) -> int:
        """Counts on one of `ranks` GPUs: heads are spread over them, copied where they are few."""
        return 2 * math.ceil(self.num_kv_heads / ranks) * self.head_size * element_bytes

    def num_tokens(self, context: int, canvas_length: int) -> int:
        """Counts what a request holds that denoises the end of a context of that length. Everything
        that the canvas' first row sees is kept, and the canvas."""
        if self.window is None:
            return context
        return min(context, self.window - 1 + canvas_length)


@dataclass(frozen=True)
class Shape:
    layers: tuple[Layer, ...]
    hidden_size: int
    canvas_length: int
    max_position_embeddings: int  # tokens
    weight_bytes: int

    def state_bytes(self) -> int:
        """Counts what a request keeps between steps: an embedding for each canvas position."""
        return self.canvas_length * self.hidden_size * MODEL_BYTES

    def kv_bytes(self, context: int, element_bytes: int, ranks: int, block_size: int) -> int:
        """Counts keys and values of a request on each GPU, in whole blocks, and one more in each
        layer with a window, which need not begin where a block does."""
        total = 0
        for layer in self.layers:
            tokens = layer.num_tokens(context, self.canvas_length)
            blocks = math.ceil(tokens / block_size) + (layer.window is not None)
            total += blocks * block_size * layer.bytes_per_token(element_bytes, ranks)
        return total


def read_shape(folder: Path, most_images: int | None = None) -> Shape:
    """Reads a checkpoint's config.json and the headers of its weight files. The vision tower
    counts only where it is loaded. `most_images`: of a prompt, None: any number.

    Raises InputError if it is not a diffusion language model, or its files are damaged.
    """
    config = _read_config(folder)
    text = config.get_text_config()
    if not (canvas_length := getattr(config, "canvas_length", None)):
        raise InputError(
            f"{folder / 'config.json'} names no canvas_length: expected a diffusion language model"
        )
    left_out = () if most_images != 0 and _serves_images(folder, config) else VISION_TOWER
    weight_bytes = sum(
        tensor.num_bytes
        for shard in read_shards(folder).values()
        for name, tensor in shard.items()
        if not name.startswith(left_out)
    )
    return Shape(
        tuple(_layer(text, index) for index in range(text.num_hidden_layers)),
        text.hidden_size,
        canvas_length,
        text.max_position_embeddings,
        weight_bytes,
    )


def _serves_images(folder: Path, config: PretrainedConfig) -> bool:
    """Decides as `models/image_processor.py` does."""
    if getattr(config, "vision_config", None) is None:
        return False
    try:
        Gemma4ImageProcessorPil.from_pretrained(folder)
    except OSError:  # no settings of an image processor
        return False
    return True


def _read_config(folder: Path) -> PretrainedConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{file} does not exist: expected the folder of a checkpoint")
    read_json(file)  # says what is wrong with the file, if it is no JSON
    register_configs()
    try:
        return AutoConfig.from_pretrained(folder)
    except ValueError as error:
        raise InputError(f"{file} is not what transformers expects ({error})") from error


def _layer(text: Any, index: int) -> Layer:
    own = text.per_layer_config[index] if text.is_heterogeneous else text
    kinds = getattr(text, "layer_types", None)
    is_sliding = kinds is not None and kinds[index] == "sliding_attention"
    return Layer(
        own.num_key_value_heads,
        getattr(own, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        text.sliding_window if is_sliding else None,
    )
