"""Replaces names of vLLM's with ours while a process runs: the only way in which this project does.

`PATCHES` has all names. `docs/upstream/README.md` says of each what needs it, and which change of
vLLM would end it; `scripts/seams` has parameters of replaced functions. A test,
`tests/unit/compat/test_patches.py`, compares vLLM before and after, so a name that is replaced in
another way does not stay unnoticed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

EVERYWHERE = (
    "v1.engine.input_processor:InputProcessor.process_inputs",
    "v1.engine.input_processor:InputProcessor.resolve_watermarking",
    "model_executor.models.config:MODELS_CONFIG_MAP[]",
    "engine.arg_utils:EngineArgs.create_engine_config",
    "v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
    "v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls",
    "v1.metrics.stats:SchedulerStats.__annotations__[]",
)
SERVER = (
    "v1.engine.async_llm:AsyncLLM.generate",
    "entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
    "entrypoints.launchers.app:init_exception_handler",
    "entrypoints.serve.engine.protocol:UsageInfo.__init__",
    "entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
    "entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs",
    "entrypoints.openai.completion.serving:OpenAIServingCompletion._create_completion_logprobs",
    "parser.parser_manager:ParserManager.get_parser",
    "v1.engine.logprobs:convert_ids_list_to_tokens",
    "v1.engine.async_llm:AsyncLLM.shutdown",
    "v1.engine.async_llm:AsyncLLM.check_admission",
    "entrypoints.launchers.launcher:NoSignalServer.shutdown",
    "entrypoints.launchers.launcher:create_server_socket",
)
ENGINE = ("v1.engine.core:EngineCore.post_step",)
WORKER = (
    "v1.worker.gpu.sample.prompt_logprob:CHUNK_SIZE",
    "v1.worker.gpu.model_runner:init_speculator",
    "model_executor.models.bailing_moe:FusedMoEFactory",
)
CPU = (
    "config.vllm:VllmConfig.use_v2_model_runner",
    "config.vllm:VllmConfig._validate_v2_model_runner",
    "v1.worker.gpu_worker:HAS_TRITON",
    "triton_utils:triton.jit",
    "triton_utils:triton.next_power_of_2",
    "v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample",
    "compilation.decorators:_try_load_aot_compiled_fn",
    "distributed.device_communicators.shm_broadcast:SpinCondition.__init__",
    "v1.executor.multiproc_executor:OMPProcessManager",
    "v1.engine.utils:CoreEngineProcManager.__init__",
    "v1.engine.utils:get_mp_context",
    "v1.executor.multiproc_executor:get_mp_context",
    "platforms.cpu:CpuPlatform.get_device_communicator_cls",
    "platforms.cpu:CpuPlatform.get_punica_wrapper",
    "lora.model_manager:get_supported_lora_modules",
    "model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls",
    "model_executor.kernels.linear:_POSSIBLE_FP8_KERNELS[]",
    "model_executor.kernels.linear:_POSSIBLE_INT8_KERNELS[]",
    "model_executor.kernels.linear:_POSSIBLE_KERNELS[]",
)
PATCHES = (*EVERYWHERE, *SERVER, *ENGINE, *WORKER, *CPU)
"""Names that are replaced in every process, in API servers, in engines, in workers and on CPUs, as
"module:name" or "module:Class.name" below `vllm`. With `[]`: an entry of that dictionary."""

_made: dict[str, list[tuple[Any, Any]]] = {}  # by target: pairs of vLLM's own and our replacement


def is_server() -> bool:
    """Whether this process serves HTTP. Others need not import what only a server needs."""
    return "vllm.entrypoints.launchers.launcher" in sys.modules


def patch(target: str, make: Callable[[Any], Any]) -> None:
    """Replaces `target` of vLLM's by `make(stock)`, where `stock` is vLLM's own also after an
    earlier call. Does nothing for those of `SERVER` in a process that is no server.

    Args:
        target: one of `PATCHES`.
        make: returns a function, or whatever else `target` is. It gets a property or a
            staticmethod where vLLM has one.
    """
    assert target in PATCHES, f"{target} must be in PATCHES"
    if target in SERVER and not is_server():
        return
    owner, name = resolve_target(target)
    stock = get_stock(target)
    ours = make(stock)
    _made.setdefault(target, []).append((stock, ours))
    setattr(owner, name, ours)


def wrap(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that runs in place of vLLM's function or method `target`, as by `patch`.
    It gets vLLM's own as its first argument, and then those of the call."""

    def install(ours: Callable[..., Any]) -> Callable[..., Any]:
        def make(stock: Any) -> Any:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return ours(stock, *args, **kwargs)

            return replacement

        patch(target, make)
        return ours

    return install


def get_stock(target: str) -> Any:
    """Returns vLLM's own `target`, also after `patch` has replaced it."""
    owner, name = resolve_target(target)
    found = vars(owner).get(name, getattr(owner, name, None))
    return next((stock for stock, ours in _made.get(target, ()) if ours is found), found)


def set_entry(target: str, key: Any, value: Any) -> None:
    """Sets the entry `key` of vLLM's dictionary `target`, which must be in `PATCHES`."""
    _dictionary(target)[key] = value


def insert_first(target: str, key: Any, value: Any) -> None:
    """Inserts `value` first in the list at `key` of vLLM's dictionary `target`. Repeatable."""
    values = _dictionary(target)[key]
    if value not in values:
        values.insert(0, value)


@contextmanager
def temporarily_patch(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `target` as `patch` does, until the context ends. Then it is vLLM's own again."""
    stock = get_stock(target)
    patch(target, make)
    try:
        yield
    finally:
        owner, name = resolve_target(target)
        setattr(owner, name, stock)


def _dictionary(target: str) -> Any:
    """Returns vLLM's dictionary `target`, which must be in `PATCHES`."""
    assert f"{target}[]" in PATCHES, f"{target}[] must be in PATCHES"
    owner, name = resolve_target(target)
    return getattr(owner, name)


def resolve_target(target: str) -> tuple[Any, str]:
    """Imports the module of `target`. Returns the module, class or object that has `target` as an
    attribute, and the attribute's name."""
    module, _, names = target.partition(":")
    owner, _, name = names.rpartition(".")
    return resolve_name(f"vllm.{module}:{owner}"), name
