"""What a start refuses or warns of: options that nobody reads, values that cannot be served."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.paths import CHECKPOINTS
from tests.unit.serving_config.conftest import Configure
from vllm_dllm import plugin
from vllm_dllm.config import masked as masked_config
from vllm_dllm.scheduling import scheduler
from vllm_dllm.serving_config import checks, images


def test_a_scheduler_of_the_users_knows_canvases(configure: Configure) -> None:
    """vLLM's own for diffusion models may be asked for. With others, requests waited for ever."""
    module = "vllm.v1.core.sched"
    configure(scheduler_cls=f"{module}.diffusion_scheduler.DiffusionAsyncScheduler")
    configure(scheduler_cls=scheduler.CanvasScheduler)
    with pytest.raises(ValueError, match=r"scheduler_cls must be a subclass of vllm.*, got 'vllm"):
        configure(scheduler_cls=f"{module}.async_scheduler.AsyncScheduler")


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"enable_mm_embeds": True}, "--enable-mm-embeds asks for embeddings"),
        ({"skip_tokenizer_init": True}, "--skip-tokenizer-init leaves out the tokenizer"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "FULL captures prompts"),
        ({"max_num_batched_tokens": 71, "max_num_seqs": 1}, "72 tokens of one step, and .* is 71"),
        ({"max_num_batched_tokens": 72, "max_num_seqs": 1}, None),
        ({"mm_processor_kwargs": {"max_soft_tokens": 70}}, None),
    ],
)
def test_where_images_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], obstacle: str | None
) -> None:
    plugin.register()
    warnings: list[tuple[str, str]] = []
    monkeypatch.setattr(images.logger, "warning", lambda *said: warnings.append(said))
    folder = str(CHECKPOINTS / "diffusiongemma-tiny-vision")
    made = EngineArgs(folder, max_model_len=1024, **options).create_engine_config()
    assert made.model_config.multimodal_config.language_model_only == (obstacle is not None)
    assert len(warnings) == (obstacle is not None)
    assert all(re.search(str(obstacle), reason) for _, reason in warnings)


@pytest.mark.parametrize(
    ("family", "name", "complaint"),
    [
        ("configure", "entropy_bound", '"diffusion_entropy_bound": ...'),
        ("configure", "diffusion_max_steps", '"diffusion_max_steps": ...'),
        ("configure", "max_denoise_steps", "is not known. Did you mean max_denoising_steps"),
        ("configure", "edit_steps", "has no effect on this model. Leave it out."),
        ("masked", "max_denoising_steps", '"diffusion_max_steps": ...'),
        ("masked", "t_max", "has no effect on this model. Leave it out."),
        ("masked", "sampler_config", "has no effect on this model. Leave it out."),
    ],
)
def test_settings_that_generation_settings_do_not_have(
    request: pytest.FixtureRequest, family: str, name: str, complaint: str
) -> None:
    """vLLM ignores names it does not know there."""
    create: Configure = request.getfixturevalue(family)
    with pytest.raises(ValueError, match=re.escape(f"{name} in --override-generation-config")) as e:
        create(override_generation_config={name: 2})
    assert complaint in str(e.value)


def test_settings_that_generation_settings_have(configure: Configure, masked: Configure) -> None:
    for name, value in {"t_max": 0.9, "max_denoising_steps": 2, "top_k": 5, "mine": 1}.items():
        configure(override_generation_config={name: value})
    masked(override_generation_config={"temperature": 0.5, "max_new_tokens": 3})


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("use_bidirectional_attention", "all", "must be 'vision', got 'all'"),
        ("hidden_activation", "silu", "must be 'gelu_pytorch_tanh', got 'silu'"),
        ("rope_parameters", {"full_attention": {"factor": 8.0}}, "must be 1, got 8.0"),
    ],
)
def test_layers_that_transformers_alone_has(
    configure: Configure, key: str, value: Any, error: str
) -> None:
    """Such checkpoints were served as if they had the usual values."""
    text = json.loads((CHECKPOINTS / "diffusiongemma-tiny" / "config.json").read_text())
    changed = text["text_config"]
    if isinstance(value, dict):
        rope = changed[key]
        value = rope | {kind: rope[kind] | keys for kind, keys in value.items()}
    with pytest.raises(ValueError, match=f"{key} in .*config.json {error}: checkpoints of other"):
        configure(hf_overrides={"text_config": {key: value}})


PUBLISHED = {"diffusion_sampler": "entropy_bound", "diffusion_entropy_bound": 0.1}
"""`--hf-overrides` of the command that Google's and vLLM's guides have for DiffusionGemma."""


@pytest.mark.parametrize(
    ("family", "name", "value", "remedy"),
    [
        ("configure", "diffusion_entropy_bound", 0.2, '{"diffusion_entropy_bound": 0.2}'),
        ("configure", "diffusion_sampler", "confidence", '{"diffusion_acceptance": "confidence"}'),
        ("configure", "diffusion_max_steps", 3, '{"diffusion_max_steps": 3}'),
        ("configure", "diffusion_edge", 3, "this server does. Leave it out."),
        ("masked", "diffusion_sampler", "entropy_bound", '"entropy_bound"}'),
    ],
)
def test_keys_in_hf_overrides_say_what_the_server_does(
    request: pytest.FixtureRequest, family: str, name: str, value: Any, remedy: str
) -> None:
    """Nothing reads them there."""
    create: Configure = request.getfixturevalue(family)
    with pytest.raises(ValueError, match=f"{name} in --hf-overrides has no effect") as refusal:
        create(hf_overrides={"block_size": 4, name: value})
    assert remedy in str(refusal.value)
    defaults = {"diffusion_entropy_bound": 0.1, "diffusion_acceptance": "entropy_bound"}
    create(hf_overrides=PUBLISHED, additional_config={"vllm_dllm": {"defaults": defaults}})


def test_the_published_command(configure: Configure) -> None:
    configure(hf_overrides=PUBLISHED, generation_config="vllm", max_num_seqs=4)


def ours(**settings: Any) -> dict[str, Any]:
    return {"additional_config": {"vllm_dllm": settings}}


VERIFIED, AHEAD = {"diffusion_acceptance": "verified"}, {"diffusion_blocks_in_flight": 3}
NO_RUNNER = "runner must be generate for a diffusion model, got"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "verified drafts without room for two blocks": (
        *("masked", ours(defaults=VERIFIED)),
        "'verified' needs room for two blocks in a canvas",
    ),
    "a default of more blocks than there are": (
        *("masked", ours(blocks_in_flight=2, defaults=AHEAD)),
        r"diffusion_blocks_in_flight must be at most 2, .* got 3",
    ),
    "several canvases in flight": (
        *("configure", ours(blocks_in_flight=2)),
        "blocks_in_flight must be 1 for this model, got 2",
    ),
    # vLLM says so of DiffusionGemma when it has loaded the model, and not what to do.
    "adapters": ("configure", {"enable_lora": True}, r"--enable-lora is not .* Merge the adapter"),
    "steps of less than a canvas": (
        *("configure", {"max_num_batched_tokens": 16, "max_num_seqs": 4}),
        "max_num_batched_tokens must be at least the canvas length, 32 tokens, got 16",
    ),
    "a runner that pools": ("configure", {"runner": "pooling"}, NO_RUNNER),
    "a masked model's runner that pools": ("masked", {"runner": "pooling"}, NO_RUNNER),
    "embeddings": ("configure", {"convert": "embed"}, NO_RUNNER),
    "a masked model's embeddings": ("masked", {"convert": "embed"}, NO_RUNNER),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served(request: pytest.FixtureRequest, case: str) -> None:
    family, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        request.getfixturevalue(family)(**options)


def test_masked_models_take_adapters(masked: Configure) -> None:
    assert masked(enable_lora=True).lora_config is not None


def test_the_server_in_rust_is_refused(
    configure: Configure, masked: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts in the place of vLLM's own, and our checks are in that one."""
    monkeypatch.setattr(checks.envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)
    for create in (configure, masked):
        with pytest.raises(ValueError, match="VLLM_USE_RUST_FRONTEND is not possible"):
            create()


@pytest.mark.parametrize(
    "option",
    [
        {"logits_processors": ["module:Processor"]},
        {"enable_trace_replay": True},
        {"kv_sharing_fast_prefill": True},
        {"enable_prompt_embeds": True},
        {"enable_return_routed_experts": True},
        {"enable_batch_sharded_sampling": True, "tensor_parallel_size": 2},
        {"enable_dbo": True},
        {"ubatch_size": 2},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_vllm_s_own_sampler_are_refused(
    configure: Configure, masked: Configure, option: dict[str, Any]
) -> None:
    """They would be ignored, or the first answer would end the engine."""
    name, value = next(iter(option.items()))
    message = re.escape(f"{name} is not possible with a diffusion model, got {value!r}")
    with pytest.raises(ValueError, match=message):
        configure(**option)
    if name != "enable_return_routed_experts":  # vLLM refuses it first, without experts
        with pytest.raises(ValueError, match=message):
            masked(**option)


@pytest.mark.parametrize(("block_length", "warnings"), [(3, 0), (4, 0), (64, 1)])
def test_blocks_longer_than_the_checkpoint_s_are_warned_of(
    masked: Configure, block_length: int, warnings: int, logged: Callable[..., list[str]]
) -> None:
    log = logged(masked_config)
    config = masked(diffusion_config={"canvas_length": block_length})
    assert config.diffusion_config.canvas_length == block_length
    assert len(log) == warnings
    assert all(
        "blocks of 64 tokens, and the checkpoint has blocks of 4 (block" in line for line in log
    )


@pytest.mark.parametrize(
    ("name", "options", "is_warned"),
    [
        ("SDAR-8B-Chat-b32", {}, True),
        ("SDAR-8B-Chat-b32", {"hf_overrides": {"block_size": 32}}, False),
        ("SDAR-8B-Chat-b32", {"diffusion_config": {"canvas_length": 32}}, False),
        ("LightningRL-8B-b32-GSM8K", {}, True),
        ("SDAR-8B-Chat-b4", {}, False),
        ("SDAR-8B-Chat", {}, False),
        ("tried-on-b200", {}, False),
    ],
)
def test_blocks_that_only_the_name_tells(
    masked: Configure,
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    is_warned: bool,
    logged: Callable[..., list[str]],
) -> None:
    """Published checkpoints have it in their names alone, and were served in blocks of 4."""
    folder = tmp_path / name
    shutil.copytree(CHECKPOINTS / "sdar-tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["block_size"]
    (folder / "config.json").write_text(json.dumps(config))
    log = logged(masked_config)
    EngineArgs(str(folder), enforce_eager=True, **options).create_engine_config()
    assert len(log) == is_warned
    assert all("says blocks of 32 tokens, and blocks of 4 are served" in line for line in log)


@pytest.mark.parametrize(("name", "is_warned"), [("uno-qwen3-8B", True), ("SDAR-4B-Juno", False)])
def test_uno_names_sdars_architecture(
    tmp_path: Path, name: str, is_warned: bool, logged: Callable[..., list[str]]
) -> None:
    """It has no blocks, and its config.json does not say so."""
    plugin.register()
    folder = shutil.copytree(CHECKPOINTS / "sdar-tiny", tmp_path / name)
    log = logged(masked_config)
    EngineArgs(str(folder), enforce_eager=True).create_engine_config()
    assert ["says UNO" in line for line in log] == [True] * is_warned
