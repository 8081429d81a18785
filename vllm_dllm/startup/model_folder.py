"""A model that cannot be served for what its folder lacks, or has: said at once, in one line.

vLLM takes any name of two words for one of the hub's, asks five times, and says nothing of folders.
It advises a newer transformers for a model that it does not know, and sentencepiece where a
tokenizer is missing.

A chat template is a program. One that never ends would block every chat, and one of vLLM's few
threads for each, so it is run once before anything is loaded.
"""

import contextlib
import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import transformers
from huggingface_hub import constants
from transformers.utils.chat_template_utils import render_jinja_template
from vllm import ModelRegistry, envs

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES
from vllm_dllm.drafters.layout import read_layout

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

_CONNECT_SECONDS = 3.0
_CONFIGS = ("config.json", "params.json")
_TOKENIZERS = (
    *("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt"),
    "tokenization*.py",
)


def check_models(arguments: "EngineArgs") -> None:
    """Raises ValueError when the model, or the drafter, is nowhere to be found or of no use."""
    check_model(arguments.model)
    folder = Path(arguments.model).expanduser()
    if arguments.tokenizer is None and not arguments.skip_tokenizer_init:
        _check_tokenizer(folder)
    if not arguments.trust_remote_code:
        _check_architecture(folder)
    speculative = arguments.speculative_config or {}
    drafter = speculative.get("model")
    if isinstance(drafter, str):
        check_model(drafter)
        if speculative.get("method") == "dflash" and (config := _read_config(Path(drafter))):
            read_layout(config, f"'{drafter}' of --speculative-config")


def _read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`; empty where there is none that can be read: vLLM says more."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _check_tokenizer(folder: Path) -> None:
    """Raises ValueError where a checkpoint's folder has none."""
    found = any(path for name in _TOKENIZERS for path in folder.glob(name))
    if _read_config(folder) and not found:
        raise ValueError(
            f"'{folder}' has no tokenizer.json: copy it from where the checkpoint is from, or name "
            f"a folder that has one with --tokenizer."
        )


def _check_architecture(folder: Path) -> None:
    """Raises ValueError for a model that neither this project nor vLLM nor transformers knows."""
    config = _read_config(folder)
    names, known = config.get("architectures") or [], ModelRegistry.get_supported_archs()
    is_known = any(name in known or hasattr(transformers, name) for name in names)
    if names and not is_known and config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"The model in '{folder}' is a {', '.join(names)}, which cannot be served. The "
            f"diffusion models that can are {', '.join((DIFFUSION_GEMMA, *FAMILIES))}."
        )


def check_model(model: str) -> None:
    """Raises ValueError when `model` is neither here nor on a hub that answers."""
    path = Path(model).expanduser()
    if path.is_dir() and not any((path / name).exists() for name in _CONFIGS):
        raise ValueError(
            f"'{path}' has no config.json: copy it from where the checkpoint is from, or name the "
            f"folder of a checkpoint ({_instead(path)})."
        )
    if path.exists() or "://" in model or envs.VLLM_USE_MODELSCOPE:
        return
    if path.is_absolute() or model.startswith(("./", "../", "~")) or len(path.parts) > 2:
        raise ValueError(
            f"There is no model '{path}': no such folder ({_instead(path)}). Name the folder of a "
            f"checkpoint."
        )
    if _is_cached(model) or _hub_answers():
        return
    raise ValueError(
        f"There is no model '{path}': no such folder ({_instead(path)}), nor does "
        f"{constants.ENDPOINT} answer, where models of other names are. Name the folder of a "
        f"checkpoint, or connect this machine to the network."
    )


def _instead(path: Path) -> str:
    """What there is where the folder was expected."""
    if not path.parent.is_dir():
        return f"there is no '{path.parent}' either"
    names = sorted(config.parent.name for config in path.parent.glob("*/config.json"))
    return f"'{path.parent}' has {', '.join(names) if names else 'no checkpoints'}"


def _is_cached(model: str) -> bool:
    """Whether something of it was downloaded before; vLLM knows best what it needs."""
    return (Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").is_dir()


def _hub_answers() -> bool:
    """Whether the hub's machine takes connections; behind a proxy only the attempt would tell."""
    address = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {address.scheme, "all"}:
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


MOST_SECONDS = 20.0
"""Templates take milliseconds; a machine may be busy."""
_CHAT = [{"role": "user", "content": "Hi"}]


class _TookTooLong(BaseException):
    """Caught by no template engine."""


def check_chat_template(folder: Path, most_seconds: float = MOST_SECONDS) -> None:
    """Raises ValueError if the template in a checkpoint's folder does not come to an end. What else
    is wrong with a template is said to those who send chats."""
    # Only there Python lets us interrupt.
    if threading.current_thread() is not threading.main_thread():
        return
    for source, template in _templates(folder):
        try:
            with _limited(most_seconds), contextlib.suppress(Exception):
                render_jinja_template([_CHAT], chat_template=template, add_generation_prompt=True)
        except _TookTooLong:
            raise ValueError(
                f"The chat template in {source} must end, got one that was not done with 'Hi' "
                f"after {most_seconds:g} s. Correct its loops, or remove it and name another with "
                f"--chat-template."
            ) from None


def _templates(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each file with a template, and the template."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield folder / "chat_template.jinja", (folder / "chat_template.jinja").read_text()
    config: Any = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "tokenizer_config.json").read_text())
    if isinstance(config, dict) and isinstance(config.get("chat_template"), str):
        yield folder / "tokenizer_config.json", config["chat_template"]


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TookTooLong in the code inside, once it has run for so long."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
