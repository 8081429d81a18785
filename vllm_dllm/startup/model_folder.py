"""Refuses a model that cannot be served for what its folder has or lacks, in one line.

vLLM takes any name of two words for a model of the hub, asks the hub five times, and does not
mention folders. It advises a newer transformers for a model that it does not know, and
sentencepiece where a tokenizer is missing.
"""

import json
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import transformers
from huggingface_hub import constants
from vllm import ModelRegistry, envs
from vllm.engine.arg_utils import EngineArgs

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES
from vllm_dllm.drafters.layout import read_layout

_CONNECT_SECONDS = 3.0
_CONFIGS = ("config.json", "params.json")
_TOKENIZERS = (
    *("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt"),
    "tokenization*.py",
)


def check_engine_arguments(arguments: EngineArgs) -> None:
    """Checks what an engine's arguments name: the model, its tokenizer, its architecture (unless
    remote code is trusted) and the drafter. Raises ValueError (DrafterMismatch, a subclass, for the
    config of a DFlash drafter) if one is missing or cannot be served. May connect to the hub."""
    check_model(arguments.model)
    folder = Path(arguments.model).expanduser()
    if "speculators_config" in _read_config(folder):
        return  # a drafter that names its target, which vLLM serves with it
    if arguments.tokenizer is None and not arguments.skip_tokenizer_init:
        _check_tokenizer(folder)
    if not arguments.trust_remote_code:
        _check_architecture(folder)
    _check_drafter(arguments.speculative_config or {})


def _check_tokenizer(folder: Path) -> None:
    """Raises ValueError if the checkpoint in `folder` has no tokenizer. Does nothing for a folder
    without a config.json."""
    found = any(path for name in _TOKENIZERS for path in folder.glob(name))
    if _read_config(folder) and not found:
        raise ValueError(
            f"'{folder}' has no tokenizer.json: copy it from the original checkpoint, or name a "
            f"folder that has one with --tokenizer."
        )


def _check_drafter(speculative: Mapping[str, Any]) -> None:
    """Raises ValueError if the drafter that `--speculative-config` names is missing, and
    DrafterMismatch if its folder has the config of no DFlash drafter where it must."""
    drafter = speculative.get("model")
    if not isinstance(drafter, str):
        return
    check_model(drafter)
    config = _read_config(Path(drafter).expanduser())
    if speculative.get("method") == "dflash" and config:
        read_layout(config, f"'{drafter}' of --speculative-config")


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns a folder's `config.json`; {} if it is no object, or unreadable, as vLLM reports."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _check_architecture(folder: Path) -> None:
    """Raises ValueError if neither this project nor vLLM nor transformers knows the model in
    `folder`. Does nothing if its config.json names no architecture."""
    config = _read_config(folder)
    names, known = config.get("architectures") or [], ModelRegistry.get_supported_archs()
    is_known = any(name in known or hasattr(transformers, name) for name in names)
    if names and not is_known and config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"The model in '{folder}' is a {', '.join(names)}, which cannot be served. The "
            f"diffusion models that can are {', '.join((DIFFUSION_GEMMA, *FAMILIES))}."
        )


def check_model(model: str) -> None:
    """Raises ValueError if `model` cannot be found: it is no checkpoint's folder here, and either
    looks like a path or no hub answers. Whether the hub has the model is left to vLLM."""
    path = Path(model).expanduser()
    if path.is_dir() and not any((path / name).exists() for name in _CONFIGS):
        raise ValueError(
            f"'{path}' has no config.json: copy it from the original checkpoint, or name the "
            f"folder of a checkpoint ({_describe_parent_folder(path)})."
        )
    if path.exists() or "://" in model or envs.VLLM_USE_MODELSCOPE:
        return
    if path.is_absolute() or model.startswith(("./", "../", "~")) or len(path.parts) > 2:
        raise ValueError(
            f"There is no model '{path}': no such folder ({_describe_parent_folder(path)}). Name "
            f"the folder of a checkpoint."
        )
    # Downloaded before, at least in part: vLLM checks whether all of it was.
    cached = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    if cached.is_dir() or _hub_answers():
        return
    raise ValueError(
        f"There is no model '{path}': no such folder ({_describe_parent_folder(path)}), and "
        f"the model hub at {constants.ENDPOINT} does not answer. Name the folder of a "
        f"checkpoint, or connect this machine to the network."
    )


def _describe_parent_folder(path: Path) -> str:
    """Returns text that says which checkpoints are in the folder in which `path` was expected."""
    if not path.parent.is_dir():
        return f"there is no '{path.parent}' either"
    names = sorted(config.parent.name for config in path.parent.glob("*/config.json"))
    return f"'{path.parent}' has {', '.join(names) if names else 'no checkpoints'}"


def _hub_answers() -> bool:
    """Whether the hub's host takes connections in `_CONNECT_SECONDS`, or there is a proxy."""
    address = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {address.scheme, "all"}:
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
