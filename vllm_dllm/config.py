"""Settings of a served diffusion model, read once at start-up and checked once.

Sources, in order: the checkpoint's `generation_config.json`, `--override-generation-config`,
`--diffusion-config` and, for what vLLM has no option for, `--additional-config
'{"vllm_dllm": {...}}'`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vllm_dllm.drafters.config import DrafterConfig

WindowRule = Literal["reference", "symmetric"]
WINDOW_RULES: tuple[str, ...] = get_args(WindowRule)

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
        _check_number("max_denoising_steps", self.max_denoising_steps, int, minimum=1)
        _check_number("t_min", self.t_min, float, minimum=0.0)
        _check_number("t_max", self.t_max, float, above=self.t_min, than="t_min")
        _check_number("entropy_bound", self.entropy_bound, float, above=0.0)
        _check_number("confidence_threshold", self.confidence_threshold, float, above=0.0)
        _check_number("stability_threshold", self.stability_threshold, int, minimum=0)

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


@dataclass(frozen=True)
class ExtensionConfig:
    """What `--additional-config '{"vllm_dllm": {...}}'` sets."""

    window_rule: WindowRule = "reference"
    """Which keys a canvas row sees on sliding-window layers: `reference` (every row sees the last
    W-1 prefix tokens and the whole canvas, as transformers does) or `symmetric` (each row sees W-1
    tokens back and W-1 ahead, as stock vLLM does). A request may override it."""
    trace_path: str | None = None
    """File to which every step's canvases are appended as JSON lines, for watching a canvas
    denoise. Costs a device-to-host copy a step."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of `options.OPTIONS`' keys for requests that leave them out."""
    sampling_memory_mib: int = 256
    """Bounds what the sampler takes beside its results, whatever the number of requests."""
    self_conditioning_tolerance: float = 0.0
    """Share of a position's probability that its expected embedding may leave out in a step, in
    blocks of 1024 tokens. 0 leaves out nothing."""
    self_conditioning_top_k: int | None = None
    """Make the expected embedding of the k most probable tokens alone; the log says how much
    probability the others had. None: of all tokens."""
    fit_canvas: bool = True
    """Denoise no canvas, first or last, wider than the tokens that its request may still get
    (rounded up to 16). The reference always denoises a whole canvas and drops the rest; so does
    this with false."""
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    """How a DFlash drafter of `--speculative-config` is used; from an object of its settings."""
    commit_last_block: bool = False
    """Write the keys and values of an answer's last block, so that the next turn of a chat finds
    them in the prefix cache. Costs a forward an answer."""

    def __post_init__(self) -> None:
        check_window_rule(self.window_rule)
        if not isinstance(self.defaults, Mapping):
            raise ValueError(f"defaults must be an object, got {self.defaults!r}.")
        _check_count("sampling_memory_mib", self.sampling_memory_mib)
        share, top_k = self.self_conditioning_tolerance, self.self_conditioning_top_k
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < 1:
            raise ValueError(
                f"self_conditioning_tolerance must be a number in [0, 1), got {share!r}."
            )
        if top_k is not None:
            _check_count("self_conditioning_top_k", top_k)
        if share and top_k:
            raise ValueError(
                "self_conditioning_tolerance and self_conditioning_top_k exclude each other."
            )
        for name in ("fit_canvas", "commit_last_block"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {value!r}.")

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "ExtensionConfig":
        """Reads the `vllm_dllm` entry of vLLM's additional config; absent means all defaults."""
        section = (
            additional_config.get("vllm_dllm") if isinstance(additional_config, Mapping) else None
        )
        if section is None:
            return cls()
        known = set(cls.__dataclass_fields__)
        if not isinstance(section, Mapping) or not set(section) <= known:
            raise ValueError(
                f"additional_config['vllm_dllm'] takes an object with the keys {sorted(known)}, "
                f"got {section!r}."
            )
        values = dict(section)
        if "drafter" in values:
            values["drafter"] = DrafterConfig.from_section(values["drafter"])
        return cls(**values)


def check_window_rule(rule: Any) -> None:
    """Raises ValueError unless `rule` names a window rule."""
    if rule not in WINDOW_RULES:
        raise ValueError(f"window rule must be one of {list(WINDOW_RULES)}, got {rule!r}.")


def _check_count(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be an integer >= 1, got {value!r}.")


def _entropy_bound(sampler_config: Any) -> Any:
    name = sampler_config.get("_cls_name") if isinstance(sampler_config, Mapping) else None
    if name != ENTROPY_BOUND_SAMPLER:
        raise ValueError(
            f"generation_config's sampler_config must be of kind {ENTROPY_BOUND_SAMPLER!r} "
            f"(for example {_EXAMPLES['sampler_config']!r}), got {sampler_config!r}."
        )
    return sampler_config.get("entropy_bound")


def _check_number(
    key: str,
    value: Any,
    kind: type,
    *,
    minimum: float | None = None,
    above: float | None = None,
    than: str = "",
) -> None:
    wanted = "an integer" if kind is int else "a number"
    if minimum is not None:
        wanted += f" >= {minimum:g}"
    if above is not None:
        wanted += f" > {than + ' = ' if than else ''}{above:g}"
    accepts = int if kind is int else (int, float)
    ok = (
        isinstance(value, accepts)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (minimum is None or value >= minimum)
        and (above is None or value > above)
    )
    if not ok:
        raise ValueError(
            f"generation_config's {key} must be {wanted}, got {value!r}. Correct it in the "
            f"checkpoint's generation_config.json or with --override-generation-config."
        )
