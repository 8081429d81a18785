"""How canvases are denoised.

Sources, in order: the checkpoint's `generation_config.json`, `--override-generation-config` and
`--diffusion-config`.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

MOST_STEPS = 1 << 20
"""The largest number of steps, or of tokens a step."""
MOST_NATS = 1e6
LOWEST_MAXIMUM, HIGHEST_TEMPERATURE = 1e-3, 1e3
"""Of a schedule's hottest step; its coolest may be 0. Logits over temperatures stay finite."""

ENTROPY_BOUND_SAMPLER = "EntropyBoundSamplerConfig"

# What the 26B checkpoint ships; quoted in errors so that a reader knows a sane value.
_EXAMPLES: dict[str, Any] = {
    "max_denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": ENTROPY_BOUND_SAMPLER, "entropy_bound": 0.1},
}


@dataclass(frozen=True)
class DenoiseConfig:
    """How a canvas is denoised. Names and meaning are those of transformers'
    `DiffusionGemmaGenerationConfig`."""

    max_denoising_steps: int
    """Most steps a canvas may take; also the length of the temperature schedule."""
    t_min: float
    """Temperature at the end of the schedule."""
    t_max: float
    """Temperature at the start of the schedule."""
    entropy_bound: float
    """Entropy, in nats, up to which the candidates of one step are accepted together."""
    confidence_threshold: float
    """Mean entropy, in nats, below which a stable canvas is finished."""
    stability_threshold: int
    """How many earlier best guesses must equal the current one; 0 asks for confidence alone."""

    def __post_init__(self) -> None:
        _check_number("max_denoising_steps", self.max_denoising_steps, int, 1, MOST_STEPS)
        _check_number("t_min", self.t_min, float, 0.0, HIGHEST_TEMPERATURE)
        _check_number("t_max", self.t_max, float, LOWEST_MAXIMUM, HIGHEST_TEMPERATURE)
        if self.t_max <= self.t_min:
            raise ValueError(
                f"generation_config's t_max must be > t_min = {self.t_min:g}, got {self.t_max!r}. "
                f"{_REMEDY}"
            )
        _check_number("entropy_bound", self.entropy_bound, float, 0.0, MOST_NATS, excluding=True)
        _check_number(
            "confidence_threshold", self.confidence_threshold, float, 0.0, MOST_NATS, excluding=True
        )
        _check_number("stability_threshold", self.stability_threshold, int, 0, MOST_STEPS)

    @classmethod
    def from_generation_config(
        cls, generation_config: Mapping[str, Any], max_denoising_steps: int | None = None
    ) -> "DenoiseConfig":
        """Reads `generation_config`; `max_denoising_steps`, when given, replaces its value.

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
        return cls(
            max_denoising_steps=values["max_denoising_steps"],
            t_min=values["t_min"],
            t_max=values["t_max"],
            entropy_bound=_entropy_bound(values["sampler_config"]),
            confidence_threshold=values["confidence_threshold"],
            stability_threshold=values["stability_threshold"],
        )


def read_denoise_config(vllm_config: VllmConfig) -> DenoiseConfig:
    """The denoising settings: `--diffusion-config` over `--override-generation-config` over the
    checkpoint's generation_config.json. Raises ValueError for a missing or unusable value."""
    model_config, diffusion_config = vllm_config.model_config, vllm_config.diffusion_config
    assert diffusion_config is not None, "vLLM creates it for every diffusion architecture"
    return DenoiseConfig.from_generation_config(
        {
            **model_config.try_get_generation_config(),
            **model_config.override_generation_config,
        },
        max_denoising_steps=diffusion_config.max_denoising_steps,
    )


def _entropy_bound(sampler_config: Any) -> Any:
    name = sampler_config.get("_cls_name") if isinstance(sampler_config, Mapping) else None
    if name != ENTROPY_BOUND_SAMPLER:
        raise ValueError(
            f"generation_config's sampler_config must be of kind {ENTROPY_BOUND_SAMPLER!r} "
            f"(for example {_EXAMPLES['sampler_config']!r}), got {sampler_config!r}."
        )
    return sampler_config.get("entropy_bound")


_REMEDY = (
    "Correct it in the checkpoint's generation_config.json or with --override-generation-config "
    "(steps also with --diffusion-config)."
)


def _check_number(
    key: str, value: Any, kind: type, least: float, most: float, *, excluding: bool = False
) -> None:
    """`excluding`: `least` itself is no such number."""
    accepts = int if kind is int else (int, float)
    ok = (
        isinstance(value, accepts)
        and not isinstance(value, bool)
        and least <= value <= most  # NaN is not
        and not (excluding and value == least)
    )
    if not ok:
        wanted = "an integer" if kind is int else "a number"
        above, bounds = ">" if excluding else ">=", "d" if kind is int else "g"
        raise ValueError(
            f"generation_config's {key} must be {wanted} {above} {least:{bounds}} and "
            f"<= {most:{bounds}}, got {reprlib.repr(value)}. {_REMEDY}"
        )
