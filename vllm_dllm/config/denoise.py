"""How canvases are denoised.

Sources, in order: the checkpoint's `generation_config.json`, `--override-generation-config` and
`--diffusion-config`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from vllm.config import VllmConfig

from vllm_dllm.config.checks import Integer, Number, parse_settings, settings

MOST_STEPS = 1 << 20
"""The largest value of a setting that counts denoise steps, or tokens of a step."""
MOST_NATS = 1e6
"""The largest threshold of an entropy, in nats."""
LOWEST_MAXIMUM, HIGHEST_TEMPERATURE = 1e-3, 1e3
"""Bounds of `t_max`, the temperature at the start of a schedule; `t_min` may be 0. Within them,
logits divided by temperatures stay finite."""

Nats = Annotated[Number, Gt(0), Le(MOST_NATS)]

ENTROPY_BOUND_SAMPLER = "EntropyBoundSamplerConfig"

# The 26B checkpoint's values, quoted in errors as examples.
_EXAMPLES: dict[str, Any] = {
    "max_denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": ENTROPY_BOUND_SAMPLER, "entropy_bound": 0.1},
}
GENERATION_SETTINGS = _EXAMPLES.keys()
"""The names of the settings in `generation_config.json`."""


@settings
class DenoiseConfig:
    """How a canvas is denoised. Names and meaning are those of transformers'
    `DiffusionGemmaGenerationConfig`."""

    max_denoising_steps: Annotated[Integer, Ge(1), Le(MOST_STEPS)]
    """Most denoise steps of a canvas, and the length of its temperature schedule."""
    t_min: Annotated[Number, Ge(0), Le(HIGHEST_TEMPERATURE)]
    """Temperature at the end of the schedule."""
    t_max: Annotated[Number, Ge(LOWEST_MAXIMUM), Le(HIGHEST_TEMPERATURE)]
    """Temperature at the start of the schedule."""
    entropy_bound: Nats
    """Entropy, in nats, up to which the candidates of one step are accepted together."""
    confidence_threshold: Nats
    """Mean entropy, in nats, below which a stable canvas is finished."""
    stability_threshold: Annotated[Integer, Ge(0), Le(MOST_STEPS)]
    """How many earlier best guesses must equal the current one before a canvas is finished. 0:
    confidence alone decides."""

    def __post_init__(self) -> None:
        """Raises ValueError unless the schedule cools down."""
        if self.t_max <= self.t_min:
            raise ValueError(
                f"generation_config's t_max must be > t_min = {self.t_min:g}, got {self.t_max!r}."
            )

    @classmethod
    def from_generation_config(
        cls, generation_config: Mapping[str, Any], max_denoising_steps: int | None = None
    ) -> "DenoiseConfig":
        """Returns the settings in `generation_config`, the contents of a generation_config.json.
        `max_denoising_steps` replaces its value there; None keeps it.

        Raises:
            ValueError: a key is missing or out of range; says which, what came and what to do.
        """
        values = dict(generation_config)
        if max_denoising_steps is not None:
            values["max_denoising_steps"] = max_denoising_steps
        for key, example in _EXAMPLES.items():
            if values.get(key) is None:
                raise ValueError(
                    f"generation_config has no '{key}', which a diffusion model needs "
                    f"(for example {example!r}). Add it to the checkpoint's generation_config.json "
                    f"or pass it with --override-generation-config."
                )
        sampler = values["sampler_config"]
        if not isinstance(sampler, Mapping) or sampler.get("_cls_name") != ENTROPY_BOUND_SAMPLER:
            raise ValueError(
                f"generation_config's sampler_config must be of kind {ENTROPY_BOUND_SAMPLER!r} "
                f"(for example {_EXAMPLES['sampler_config']!r}), got {sampler!r}. Correct it "
                f"there, or with --override-generation-config."
            )
        values["entropy_bound"] = sampler.get("entropy_bound")
        known = {key: values[key] for key in cls.__annotations__}
        return parse_settings(cls, known, "generation_config's ", _REMEDY)


def read_denoise_config(vllm_config: VllmConfig) -> DenoiseConfig:
    """Returns the server's denoising settings. `--diffusion-config` precedes
    `--override-generation-config`, and that precedes the checkpoint's generation_config.json.

    Raises:
        ValueError: a value is missing or cannot be used.
    """
    model_config, diffusion_config = vllm_config.model_config, vllm_config.diffusion_config
    assert diffusion_config is not None, "vLLM creates it for every diffusion architecture"
    return DenoiseConfig.from_generation_config(
        {**model_config.try_get_generation_config(), **model_config.override_generation_config},
        max_denoising_steps=diffusion_config.max_denoising_steps,
    )


_REMEDY = (
    " Correct it in the checkpoint's generation_config.json or with --override-generation-config "
    "(steps also with --diffusion-config)."
)
