"""Refuses a model that cannot be served for what its folder has or lacks, in one line; also for a
chat template that never ends, which would hold up a server at its first chat.

vLLM takes any name of two words for a model of the hub, asks the hub five times, and does not
mention folders. It asks a hub that does not answer for minutes, also for a model that was
downloaded before. It advises a newer transformers for a model that it does not know, and
sentencepiece where a tokenizer is missing.
"""

import contextlib
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import transformers
from huggingface_hub import constants
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.utils.chat_template_utils import render_jinja_template
from vllm import ModelRegistry, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import try_get_local_file

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES
from vllm_dllm.drafters.layout import read_layout
from vllm_dllm.quantization.weight_files import read_json

logger = init_logger(__name__)

_CONFIGS = ("config.json", "params.json")
_TOKENIZERS = (
    *("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt"),
    "tokenization*.py",
)


def check_engine_arguments(arguments: EngineArgs) -> None:
    """Checks what an engine's arguments name: the model, its JSON files, its tokenizer, its
    architecture and the drafter. Raises ValueError (InputError, a subclass, for the config of a
    DFlash drafter) if one is missing, cannot be served or stands in another's place. May connect to
    the hub."""
    check_model(arguments.model)
    folder = Path(arguments.model).expanduser()
    config = read_json(folder / "config.json")
    if "speculators_config" in config:
        return  # a drafter that names its target, which vLLM serves with it
    if "dflash_config" in config:
        raise ValueError(
            f"'{folder}' is a drafter: name the folder of its target, and the drafter in "
            f'--speculative-config \'{{"method": "dflash", "model": "{folder}", '
            f'"num_speculative_tokens": 15}}\'.'
        )
    if config.get("predictor") == "blockpilot":
        raise ValueError(
            f"'{folder}' is a width predictor: name the folder of its target, and the predictor in "
            f"drafter.predictor of --additional-config."
        )
    read_json(folder / "generation_config.json")
    if arguments.tokenizer:
        _check_is_found(arguments.tokenizer, "tokenizer")
    if arguments.generation_config not in ("auto", "vllm"):
        _check_is_found(arguments.generation_config, "generation-config")
        if (file := Path(arguments.generation_config).expanduser()).is_file():
            raise ValueError(
                f"--generation-config must be a folder, got the file '{file}': name "
                f"'{file.parent}'."
            )
    if not arguments.skip_tokenizer_init:
        _check_tokenizer(Path(arguments.tokenizer or folder).expanduser())
    if (folder / "config.json").exists():
        _check_architecture(arguments, config)
    _check_drafter(arguments.speculative_config or {})


def check_downloaded_model(arguments: EngineArgs) -> None:
    """Raises ValueError, as for a folder, if a model of the hub that vLLM has refused names an
    architecture that cannot be served. vLLM's own error asks to trust its code, or lists all that
    vLLM knows. Does nothing if its config.json was not downloaded."""
    file = try_get_local_file(arguments.model, "config.json", arguments.revision)
    if isinstance(file, Path):
        _check_architecture(arguments, read_json(file))


def _check_tokenizer(folder: Path) -> None:
    """Raises ValueError if `folder` has no tokenizer, or one that is broken. Does nothing if there
    is no such folder."""
    if folder.is_dir() and not any(path for name in _TOKENIZERS for path in folder.glob(name)):
        raise ValueError(
            f"'{folder}' has no tokenizer.json: copy it from the original checkpoint, or name a "
            f"folder that has one with --tokenizer."
        )
    read_json(folder / "tokenizer_config.json")
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists() and "model" not in read_json(tokenizer):
        raise ValueError(f"{tokenizer} has no 'model': copy or download it again")


def _check_drafter(speculative: Mapping[str, Any]) -> None:
    """Raises ValueError if the drafter that `--speculative-config` names is missing, and
    InputError if its folder has the config of no DFlash drafter where it must."""
    drafter = speculative.get("model")
    if not isinstance(drafter, str):
        return
    check_model(drafter)
    config = read_json(Path(drafter).expanduser() / "config.json")
    if speculative.get("method") == "dflash" and config:
        read_layout(config, f"'{drafter}' of --speculative-config")


def _check_architecture(arguments: EngineArgs, config: Mapping[str, Any]) -> None:
    """Raises ValueError if `config`, the model's, names no architecture and none follows from its
    type, or, unless remote code is trusted, if neither this project nor vLLM nor transformers knows
    it."""
    overrides = arguments.hf_overrides
    config = {**config, **(overrides if isinstance(overrides, dict) else {})}
    names, known = config.get("architectures") or [], ModelRegistry.get_supported_archs()
    kind = config.get("model_type")
    if names:
        what = f"is a {', '.join(names)}, which"
        is_known = arguments.trust_remote_code or kind in transformers.CONFIG_MAPPING
        is_known |= any(name in known or hasattr(transformers, name) for name in names)
    else:
        what = "has no architectures in its config.json: it"
        is_known = MODEL_MAPPING_NAMES.get(kind) in known  # which vLLM takes
    if not is_known:
        folder = Path(arguments.model).expanduser()  # or a name of the hub's
        raise ValueError(
            f"The model in '{folder}' {what} cannot be served. The diffusion models that can are "
            f"{', '.join((DIFFUSION_GEMMA, *FAMILIES))}."
        )


def check_model(model: str) -> None:
    """Raises ValueError if `model` cannot be found: it is no checkpoint's folder here, and either
    looks like a path or no hub answers. Whether the hub has the model is left to vLLM."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"'{path}' is a file: name its folder, '{path.parent}'.")
    if path.is_dir() and not any((path / name).exists() for name in _CONFIGS):
        raise ValueError(
            f"'{path}' has no config.json: copy it from the original checkpoint, or name the "
            f"folder of a checkpoint ({_describe_checkpoints(path)})."
        )
    _check_is_found(model, "model")


def _check_is_found(name: str, kind: str) -> None:
    """Raises ValueError if there is no file or folder `name`, and it either looks like a path or no
    hub answers. `kind`: what it is, in the error: "model", or the option that names it."""
    path = Path(name).expanduser()
    if path.exists() or "://" in name or envs.VLLM_USE_MODELSCOPE:
        return
    is_path = path.is_absolute() or name.startswith(("./", "../", "~")) or len(path.parts) > 2
    if not is_path and _is_left_to_vllm(name):
        return
    beside = _describe_checkpoints(path)
    answer = "" if is_path else f", and {_why_no_hub()}"
    network = "" if is_path else ", or connect this machine to the network"
    option = "" if kind == "model" else f" with --{kind}"
    raise ValueError(
        f"There is no {kind} '{path}': no such folder ({beside}){answer}. Name the folder of a "
        f"checkpoint{option}{network}."
    )


def _is_left_to_vllm(name: str) -> bool:
    """Whether vLLM may find the model `name`: in the hub's cache, which may have a part of it, or
    on the hub. Warns of a model in the cache whose hub does not answer: vLLM asks for minutes."""
    is_cached, answers = _is_in_cache(name), _hub_answers()
    if is_cached and not answers and not constants.HF_HUB_OFFLINE:
        logger.warning(
            "The model hub at %s does not answer. HF_HUB_OFFLINE=1 serves '%s' from %s without it.",
            *(constants.ENDPOINT, name, constants.HF_HUB_CACHE),
        )
    return is_cached or answers


def _describe_checkpoints(path: Path) -> str:
    """Returns text that says which checkpoints are in the folder `path` or, if none are, beside
    it."""
    for folder in (path, path.parent):
        if names := sorted(config.parent.name for config in folder.glob("*/config.json")):
            return f"'{folder}' has {', '.join(names)}"
    if not path.parent.is_dir():
        return f"there is no '{path.parent}' either"
    return f"'{path.parent}' has no checkpoints"


_CONNECT_SECONDS = 3.0


def _is_in_cache(name: str) -> bool:
    """Whether the hub's cache has the model `name`, or a part of it."""
    return (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()


def _hub_answers() -> bool:
    """Whether the hub may be asked, and its host takes connections in `_CONNECT_SECONDS` or there
    is a proxy."""
    if constants.HF_HUB_OFFLINE:
        return False
    address = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {address.scheme, "all"}:
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _why_no_hub() -> str:
    """Returns why the hub has no model, as a part of a sentence."""
    if constants.HF_HUB_OFFLINE:
        return f"{constants.HF_HUB_CACHE} does not have it, and HF_HUB_OFFLINE is set"
    return f"the model hub at {constants.ENDPOINT} does not answer"


LIMIT_S = 20.0
"""Seconds that a template may run. It takes milliseconds, but a machine may be busy."""


class _TookTooLong(BaseException):
    """Raised in a slow template. It is no Exception, so that no template engine catches it."""


def check_chat_template(folder: Path, limit_s: float = LIMIT_S) -> None:
    """Runs the chat templates in a checkpoint's folder once. Does nothing outside the main thread.
    Other errors of a template are not raised here: clients who send chats get them.

    Raises:
        ValueError: a template runs for longer than `limit_s` seconds.
    """
    # Python handles signals only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        return
    for source, template in _read_templates(folder):
        try:
            with _time_limit(limit_s), contextlib.suppress(Exception):
                chat = [{"role": "user", "content": "Hi"}]
                render_jinja_template([chat], chat_template=template, add_generation_prompt=True)
        except _TookTooLong:
            raise ValueError(
                f"The chat template in {source} must end, got one that was not done with 'Hi' "
                f"after {limit_s:g} s. Correct its loops, or remove it and name another with "
                f"--chat-template."
            ) from None


def _read_templates(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields each readable file in `folder` with a chat template, and the template."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield folder / "chat_template.jinja", (folder / "chat_template.jinja").read_text()
    config = read_json(folder / "tokenizer_config.json")
    if isinstance(config.get("chat_template"), str):
        yield folder / "tokenizer_config.json", config["chat_template"]


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises _TookTooLong in the context once it has run for `seconds`. Replaces the handler of
    SIGALRM meanwhile, so it must be entered in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
