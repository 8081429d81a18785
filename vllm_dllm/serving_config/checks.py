"""Start-up checks of what no diffusion model can be served with."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import ModelConfig, SchedulerConfig, VllmConfig

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, family_of
from vllm_dllm.config.checks import nearest_name, normalize_name
from vllm_dllm.config.denoise import GENERATION_SETTINGS
from vllm_dllm.quantization.weight_files import INDEX_FILE, WEIGHTS_FILE, read_shards
from vllm_dllm.requests.options import KEYS, OTHER_NAMES, PREFIX


def check_use(vllm_config: VllmConfig) -> None:
    """Raises ValueError for embeddings and classes, which no diffusion model is trained for, for
    pipeline parallelism, where one stage alone knows what is committed, for adapters of
    DiffusionGemma, and for vLLM's API server in Rust, which runs none of our checks."""
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ValueError(
            "VLLM_USE_RUST_FRONTEND is not possible with a diffusion model: its requests are "
            "checked in Python. Unset it."
        )
    if (runner := vllm_config.model_config.runner_type) == "pooling":
        raise ValueError(
            f"runner must be generate for a diffusion model, got {runner}. Leave --runner and "
            f"--convert out."
        )
    if (size := vllm_config.parallel_config.pipeline_parallel_size) != 1:
        raise ValueError(
            f"pipeline_parallel_size must be 1 for a diffusion model, got {size}: only the "
            f"last stage learns which canvases are committed. Use --tensor-parallel-size."
        )
    is_uniform = vllm_config.model_config.architecture == DIFFUSION_GEMMA
    if is_uniform and vllm_config.lora_config is not None:
        raise ValueError(
            "--enable-lora is not possible with DiffusionGemma. Merge the adapter into the "
            "checkpoint, and leave the option out."
        )


def check_sampler_options(vllm_config: VllmConfig) -> None:
    """Raises ValueError for options that only vLLM's own runners know, and for two with which an
    assertion of vLLM's would end the engine: the experts of each token, and prefills that skip
    layers, at a request for `prompt_logprobs`. Also for steps in halves (`enable_dbo`): the halves
    would share the flags that attention reads, and a canvas sees all of its rows."""
    model_config, drafts = vllm_config.model_config, vllm_config.speculative_config
    parallel_config = vllm_config.parallel_config
    for option, value in (
        ("speculative_config", drafts and drafts.method),
        ("logits_processors", model_config.logits_processors),
        ("enable_trace_replay", model_config.enable_trace_replay),
        ("enable_prompt_embeds", model_config.enable_prompt_embeds),
        ("kv_sharing_fast_prefill", vllm_config.cache_config.kv_sharing_fast_prefill),
        ("enable_return_routed_experts", vllm_config.aux_output_config.enabled),
        ("enable_batch_sharded_sampling", parallel_config.enable_batch_sharded_sampling),
        ("enable_dbo", parallel_config.enable_dbo),
        ("ubatch_size", parallel_config.ubatch_size > 1 and parallel_config.ubatch_size),
    ):
        if value:
            raise ValueError(
                f"{option} is not possible with a diffusion model, got {value!r}. Leave it out."
            )


def check_scheduler(scheduler_config: SchedulerConfig) -> None:
    """Raises ValueError for a scheduler class that is not one of vLLM's for diffusion models, which
    alone schedule a canvas in one piece: requests would wait for ever."""
    from vllm_dllm.compat.scheduler import StockDiffusionScheduler  # imports the engine

    scheduler_cls = scheduler_config.get_scheduler_cls()
    if isinstance(scheduler_cls, type) and not issubclass(scheduler_cls, StockDiffusionScheduler):
        raise ValueError(
            f"scheduler_cls must be a subclass of {StockDiffusionScheduler.__module__}."
            f"{StockDiffusionScheduler.__name__} for a diffusion model, got "
            f"{scheduler_config.scheduler_cls!r}. Leave --scheduler-cls out."
        )


def check_weight_files(vllm_config: VllmConfig) -> None:
    """Raises ValueError, naming the file, if a weight file of a local checkpoint is missing, cut
    short or not in safetensors. vLLM's loader reads the files that are there, and its errors name
    none. Files of other names and formats that the user asks for are left to vLLM."""
    folder, load_format = Path(vllm_config.model_config.model), vllm_config.load_config.load_format
    known = (folder / INDEX_FILE).exists() or os.path.lexists(folder / WEIGHTS_FILE)
    # vLLM handles formats that are asked for by name, and safetensors of other names.
    unread = load_format == "auto" and folder.is_dir() and not any(folder.glob("*.safetensors"))
    if (known and load_format in _FORMATS_OF_INDEX) or unread:
        read_shards(folder)


_FORMATS_OF_INDEX = {
    *("auto", "hf", "safetensors"),
    *("fastsafetensors", "instanttensor", "runai_streamer"),
}
"""vLLM's load formats that read the files of an index. Beside those of another, such as
`sharded_state`, an index may be left over from the checkpoint that they were made from."""


def check_stop_tokens(vllm_config: VllmConfig) -> None:
    """Raises ValueError if a stop token is not in the vocabulary, so that no answer would end."""
    model_config = vllm_config.model_config
    vocab_size = model_config.get_vocab_size()
    sources = {
        "generation_config.json": model_config.try_get_generation_config(),
        "config.json": {"eos_token_id": getattr(model_config.hf_config, "eos_token_id", None)},
    }
    for file, values in sources.items():
        ids = values.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"eos_token_id in {file} must be a token id, or several, from 0 to "
                    f"{vocab_size - 1}, got {ids!r}: no answer would end. Correct it there."
                )


def check_layers(model_config: ModelConfig) -> None:
    """Raises ValueError for values in DiffusionGemma's text config that transformers follows, and
    vLLM's layers or ours ignore."""
    config = model_config.hf_text_config
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {
        # "all": prompts are bidirectional, too.
        "use_bidirectional_attention": (config.use_bidirectional_attention, (None, "vision")),
        # vLLM's experts and our self-conditioning have this one.
        "hidden_activation": (config.hidden_activation, ("gelu_pytorch_tanh",)),
    }
    for layer_type, rope in (config.rope_parameters or {}).items():
        if isinstance(rope, Mapping) and rope.get("rope_type") == "proportional":
            found[f"factor of {layer_type} in rope_parameters"] = (rope.get("factor", 1), (1,))
    for key, (value, served) in found.items():
        if value not in served:
            raise ValueError(
                f"{key} in {model_config.model}/config.json must be {served[-1]!r}, got {value!r}: "
                f"checkpoints of other variants are not served. Use another checkpoint."
            )


def check_overrides(vllm_config: VllmConfig) -> None:
    """Raises ValueError if `--override-generation-config` has one of our settings under a name that
    this model does not read there."""
    model_config = vllm_config.model_config
    family = family_of(model_config.architecture, model_config.hf_config)
    for name in model_config.override_generation_config:
        if family is None and name in GENERATION_SETTINGS:
            continue
        field = normalize_name(name).removeprefix(PREFIX)
        key = PREFIX + OTHER_NAMES.get(field, field)
        mark = KEYS.get(key)
        is_of_model = mark is not None and (mark.uniform if family is None else mark.masked)
        near = nearest_name(name, GENERATION_SETTINGS, likeness=0.85)
        if mark is not None and mark.by_server and is_of_model:
            raise ValueError(
                f"{name} in --override-generation-config has no effect on this model. Use "
                f'--additional-config \'{{"vllm_dllm": {{"defaults": {{"{key}": ...}}}}}}\'.'
            )
        if mark is not None or (near and family is not None):
            raise ValueError(
                f"{name} in --override-generation-config has no effect on this model. Leave it out."
            )
        if near:
            raise ValueError(
                f"{name} in --override-generation-config is not known. Did you mean {near}?"
            )


def check_hf_overrides(overrides: Any, in_effect: Mapping[str, Any]) -> None:
    """Raises ValueError if `--hf-overrides` has one of our keys with another value than the server
    uses: many published commands for DiffusionGemma have keys there, where nothing reads them.
    `in_effect`: the server's values, by field of `RequestOptions`."""
    for name, value in overrides.items() if isinstance(overrides, dict) else ():
        field = name.removeprefix(PREFIX)
        field = "acceptance" if field == "sampler" else field
        if not name.startswith(PREFIX) or in_effect.get(field) == value:
            continue
        mark = KEYS.get(PREFIX + field)
        setting = f'{{"vllm_dllm": {{"defaults": {{"{PREFIX}{field}": {json.dumps(value)}}}}}}}'
        remedy = (
            f"Use --additional-config '{setting}'" if mark and mark.by_server else "Leave it out"
        )
        raise ValueError(
            f"{name} in --hf-overrides has no effect, and it is {value!r} there, which is not what "
            f"this server does. {remedy}."
        )


def check_token_budget(vllm_config: VllmConfig) -> None:
    """Raises ValueError if a limit of a step's tokens is below the canvas length. A canvas is
    denoised in one piece, so its request would wait for ever."""
    assert vllm_config.diffusion_config is not None
    canvas_length = vllm_config.diffusion_config.canvas_length
    config = vllm_config.scheduler_config
    for name in (
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
    ):
        budget = getattr(config, name)
        if budget and budget < canvas_length:  # 0 and None: no such limit
            remedy = "Raise it or leave it out."
            if canvas_length > vllm_config.model_config.hf_config.canvas_length:
                remedy = (
                    "Raise it, or lower canvas_length in --diffusion-config or blocks_in_flight in "
                    "--additional-config."
                )
            raise ValueError(
                f"{name} must be at least the canvas length, {canvas_length} tokens, got {budget}: "
                f"a canvas is denoised in one piece. {remedy}"
            )
