"""Reads which tensors a checkpoint to be quantised has, without their values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES
from vllm_dllm.errors import InputError
from vllm_dllm.quantization import weight_files
from vllm_dllm.quantization.weight_files import TensorInfo


@dataclass(frozen=True)
class Source:
    """A checkpoint to be quantised: its config, and the headers of its weight files."""

    path: Path
    config: dict[str, Any]
    """The contents of config.json."""
    shards: dict[str, dict[str, TensorInfo]]
    """File name -> tensor name -> type, shape and place; in the order of the file names."""
    has_index: bool  # whether a file names the shard of each tensor

    @property
    def is_masked(self) -> bool:
        """Whether the checkpoint is one of a masked model. If not, it is DiffusionGemma's."""
        return DIFFUSION_GEMMA not in self.config["architectures"]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Tensor name -> type, shape and place, of all shards together."""
        return {name: info for shard in self.shards.values() for name, info in shard.items()}


def read_source(path: Path) -> Source:
    """Returns the checkpoint in the folder `path`.

    Raises:
        InputError: it is not a complete, unquantised checkpoint of a model that we serve.
    """
    if not (path / "config.json").exists():
        raise InputError(f"{path} is not the folder of a checkpoint: it has no config.json")
    config = weight_files.read_json(path / "config.json")
    served = {DIFFUSION_GEMMA, *FAMILIES}
    if served.isdisjoint(config.get("architectures") or ()):
        raise InputError(
            f"{path / 'config.json'}: expected the architecture {DIFFUSION_GEMMA} or that of a "
            f"masked model ({', '.join(FAMILIES)}), got {config.get('architectures')}: only "
            f"these checkpoints can be quantised"
        )
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method")
        raise InputError(
            f"{path / 'config.json'} has a quantization_config ({method}): {path} is quantised "
            f"already; start from the unquantised checkpoint"
        )
    shards = weight_files.read_shards(path)
    for file, tensors in shards.items():
        for name, info in tensors.items():
            if info.dtype not in weight_files.UNQUANTISED_BYTES:
                raise InputError(
                    f"{path / file}: {name} has the type {info.dtype}, expected an unquantised one "
                    f"({', '.join(weight_files.UNQUANTISED_BYTES)}): start from the unquantised "
                    f"checkpoint"
                )
    return Source(path, config, shards, has_index=(path / weight_files.INDEX_FILE).exists())
