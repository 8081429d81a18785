"""Computes from a checkpoint's shape what takes a GPU's memory, and how many requests fit."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.step_sizes import max_canvases_per_step
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import read_shards
from vllm_dllm.tools.inputs import read_config
from vllm_dllm.tools.plan import GPUS
from vllm_dllm.tools.terminal import format_size

GIB = 1 << 30
MEMORY_UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization
WORKSPACE = 3 * GIB
"""Memory, in bytes, that is assumed for activations, CUDA graphs and libraries. vLLM measures it
when it starts."""
SAMPLING = ExtensionConfig().sampling_memory_mib << 20  # bytes
KV_DTYPES = {"auto": torch.bfloat16, "fp8": torch.uint8}  # by --kv-cache-dtype
BLOCK_SIZE = 16  # tokens of a cache block: vLLM's default on GPUs


@dataclass(frozen=True)
class Plan:
    """The use of the memory of each of `ranks` GPUs by requests of `context` tokens. Sizes are in
    bytes."""

    context: int
    ranks: int
    memory: int  # all that vLLM uses
    weights: int
    state: int  # what one request keeps between steps
    kv: int  # keys and values of one request
    shape: "Shape"  # of the checkpoint

    @property
    def left(self) -> int:
        """The memory that is left for requests, in bytes; negative if the weights do not fit."""
        return self.memory - self.weights - WORKSPACE - SAMPLING

    @property
    def max_requests(self) -> int:
        """The number of requests for which the memory has room."""
        return max(0, self.left // (self.kv + self.state))


def make_plan(
    checkpoint: Path,
    memory_gib: float,  # of each GPU
    context: int,
    ranks: int,
    kv_cache_dtype: str,  # a key of `KV_DTYPES`
    most_images: int | None = None,  # of a prompt; None: any number
) -> Plan:
    """Returns the plan for a checkpoint. Raises InputError if the checkpoint cannot be read, or a
    number is out of range."""
    for name, number in (("--context", context), ("--tensor-parallel-size", ranks)):
        if number < 1:
            raise InputError(f"{name} must be at least 1, got {number}")
    if not 0 < memory_gib < math.inf:
        raise InputError(f"--memory-gib must be a finite number above 0, got {memory_gib}")
    shape = read_shape(checkpoint, most_images)
    return Plan(
        context=context,
        ranks=ranks,
        memory=int(MEMORY_UTILIZATION * memory_gib * GIB),
        weights=shape.weight_bytes // ranks,
        state=shape.state_bytes(),
        kv=shape.kv_bytes(context, KV_DTYPES[kv_cache_dtype], ranks),
        shape=shape,
    )


def print_plan(checkpoint: Path, gpu: str, memory_gib: float | None, **options: Any) -> None:
    """Prints the plan. `memory_gib` None: the memory of the GPU's data sheet. `options` are the
    other parameters of `make_plan`. Raises InputError as `make_plan` does, and if the weights do
    not fit."""
    if memory_gib is None:
        memory_gib = GPUS[gpu].memory_gib
    plan = make_plan(checkpoint, memory_gib, **options)
    if plan.left <= 0:
        raise InputError(
            f"the weights take {plan.weights / GIB:.1f} of the {plan.memory / GIB:.1f} GiB that "
            f"vLLM uses of each {gpu}, and {WORKSPACE / GIB:g} GiB are needed beside them: raise "
            f"--tensor-parallel-size, or quantise the checkpoint"
        )
    print("\n".join(format_plan(plan, checkpoint.resolve().name, gpu)))


def format_plan(plan: Plan, name: str, gpu: str) -> list[str]:
    """Returns the lines that `print_plan` prints. `name` is the checkpoint's."""
    shape = plan.shape
    gpus = f"each of {plan.ranks:,} {gpu}" if plan.ranks > 1 else f"one {gpu}"
    rows = [
        ("used by vLLM", plan.memory, f"{MEMORY_UTILIZATION:.0%}: --gpu-memory-utilization"),
        ("  weights", plan.weights, "from the headers of the files"),
        ("  workspace", WORKSPACE, "activations, graphs: an assumption"),
        ("  sampling", SAMPLING, "sampling_memory_mib"),
        ("  requests", plan.left, "what is left"),
        ("a request", plan.kv + plan.state, ""),
        ("  keys and values", plan.kv, f"{plan.context:,} tokens"),
        ("  between steps", plan.state, "an embedding per canvas position"),
    ]
    lines = [f"{name}, {gpus}, {plan.context:,} tokens of context per request", ""]
    lines += [f"{label:18} {format_size(size)}   {why}".rstrip() for label, size, why in rows]
    lines += ["", f"Memory has room for {plan.max_requests:,} requests."]
    if plan.context > shape.max_position_embeddings:
        lines.append(
            f"But the model is for {shape.max_position_embeddings:,} tokens at most "
            f"(max_position_embeddings in its config.json): vLLM refuses --max-model-len "
            f"{plan.context}."
        )
    if shape.num_heads % plan.ranks:
        lines.append(
            f"But {plan.ranks:,} GPUs cannot share the {shape.num_heads} heads of its attention "
            f"evenly: vLLM refuses --tensor-parallel-size {plan.ranks}."
        )
    budget = GPUS[gpu].token_budget
    canvases = max_canvases_per_step(budget, shape.canvas_length)
    lines.append(
        f"A step of {budget:,} tokens denoises {canvases:,} canvases: for more at once, raise "
        f"--max-num-batched-tokens and --max-num-seqs."
    )
    is_26b = (len(shape.layers), shape.hidden_size) == (30, 2816)
    if is_26b and (published := GPUS[gpu].published_tokens_per_s):
        lines.append(
            f"Published for stock vLLM, FP8, one request: {published:,} tokens per second."
        )
    return lines


VISION_TOWER = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
MODEL_BYTES = 2  # of an element of an activation or an expected embedding: bf16


class Layer(NamedTuple):
    """The sizes of one attention layer's keys and values."""

    num_kv_heads: int
    head_size: int  # elements
    window: int | None  # tokens that a row sees; None: all (full attention)


@dataclass(frozen=True)
class Shape:
    """The sizes of a checkpoint, which decide the memory that it takes."""

    layers: tuple[Layer, ...]
    hidden_size: int
    canvas_length: int  # tokens
    max_position_embeddings: int  # tokens
    num_heads: int  # of a layer's queries
    weight_bytes: int  # of all tensors that a server loads

    def state_bytes(self) -> int:
        """Returns the bytes that a request keeps between steps: an embedding for each canvas
        position."""
        return self.canvas_length * self.hidden_size * MODEL_BYTES

    def kv_bytes(self, context: int, dtype: torch.dtype, ranks: int) -> int:
        """Returns the bytes of the keys and values of a request of `context` tokens on each of
        `ranks` GPUs, as vLLM counts them: in whole blocks, of layers with a window for what the
        canvas' first row sees, and the canvas. Heads are spread over the GPUs. If they are fewer
        than the GPUs, they are copied."""
        total = 0
        for layer in self.layers:
            sizes: dict[str, Any] = {
                "block_size": BLOCK_SIZE,
                "num_kv_heads": math.ceil(layer.num_kv_heads / ranks),
                "head_size": layer.head_size,
                "dtype": dtype,
            }
            if layer.window is None:
                block, blocks = FullAttentionSpec(**sizes), math.ceil(context / BLOCK_SIZE)
            else:
                block = SlidingWindowSpec(**sizes, sliding_window=layer.window)
                blocks = block.max_admission_blocks_per_request(self.canvas_length, context)
            total += blocks * block.page_size_bytes
        return total


def read_shape(folder: Path, most_images: int | None = None) -> Shape:
    """Returns the sizes in a checkpoint's config.json and in the headers of its weight files.
    `most_images` is the limit of a prompt; None: any number. If it is 0, vLLM does not load the
    vision tower.

    Raises:
        InputError: it is not a diffusion language model, or its files are damaged.
    """
    config = read_config(folder)
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
        layers=tuple(_read_layer(text, index) for index in range(text.num_hidden_layers)),
        hidden_size=text.hidden_size,
        canvas_length=canvas_length,
        max_position_embeddings=text.max_position_embeddings,
        num_heads=text.num_attention_heads,
        weight_bytes=weight_bytes,
    )


def _serves_images(folder: Path, config: PretrainedConfig) -> bool:
    """Returns whether a server of the checkpoint takes images. `models/image_processor.py` decides
    the same."""
    if getattr(config, "vision_config", None) is None:
        return False
    try:
        Gemma4ImageProcessorPil.from_pretrained(folder)
    except OSError:  # no settings of an image processor
        return False
    return True


def _read_layer(text: Any, index: int) -> Layer:
    """Returns the sizes of layer `index` of a text config."""
    own = text.per_layer_config[index] if text.is_heterogeneous else text
    kinds = getattr(text, "layer_types", None)
    is_sliding = kinds is not None and kinds[index] == "sliding_attention"
    head_size = getattr(own, "head_dim", None) or text.hidden_size // text.num_attention_heads
    window = text.sliding_window if is_sliding else None
    return Layer(own.num_key_value_heads, head_size, window)
