"""Memory of a served checkpoint, by its shape: weights, what a request keeps, keys and values."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from vllm_dllm.config.architectures import register_configs
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import read_json, read_shards

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
