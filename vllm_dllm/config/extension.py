"""Settings that vLLM has no option for: `--additional-config '{"vllm_dllm": {...}}'`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, field
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from vllm_dllm.config.checks import (
    Boolean,
    Count,
    Integer,
    Number,
    PathName,
    nearest_name,
    normalize_name,
    parse_settings,
    settings,
)
from vllm_dllm.config.denoise import MOST_NATS, MOST_STEPS
from vllm_dllm.config.drafter import DrafterConfig

WindowRule = Literal["reference", "symmetric"]
KernelChoice = Literal["measured", "shipped", "stock"]
SECTION = "vllm_dllm"
"""Key of vLLM's additional config."""


@settings
class RequestLimits:
    """Limits of one request, so that it does not hold up requests of other clients. Each has the
    name of what it limits. A request beyond one is answered with HTTP 400, but canvases beyond
    `canvases` take turns."""

    n: Count = 64
    """Most answers of a request: `n` times the prompts of a completion."""
    prompt_logprobs: Count = 2048
    """Most log-probabilities of prompts: their tokens times one more than `prompt_logprobs`."""
    bad_words: Count = 1024
    """Most tokens of all `bad_words` together."""
    logit_bias: Count = 1024
    """Most tokens that get a bias."""
    prediction: Count = 32_768
    """Most tokens of a predicted output. A server keeps room for that of each request that it runs
    at once."""
    canvas_length: Count = 8
    """The least `diffusion_canvas_length`: a canvas takes as many steps for a few tokens as for
    many."""
    canvases: Count | None = None
    """Most canvases of one HTTP request in a step that other requests share; more take turns. None:
    2 on CPUs, where each canvas makes a step longer; elsewhere a quarter of `--max-num-seqs`."""


@settings
class LoadStage:
    """Looser thresholds of convergence while a server is busy. They apply in steps with at least
    `canvases` canvases, and only to requests that allow it and whose own thresholds are tighter."""

    canvases: Count
    confidence_threshold: Annotated[Number, Ge(0), Le(MOST_NATS)] = 0.0
    """Mean entropy in nats, see `DenoiseConfig`. 0 loosens nothing."""
    stability_threshold: Annotated[Integer, Ge(0), Le(MOST_STEPS)] = MOST_STEPS
    """Number of equal best guesses, see `DenoiseConfig`. `MOST_STEPS` loosens nothing."""

    def __str__(self) -> str:
        """Returns the stage as a user writes it: without thresholds that loosen nothing."""
        unset = asdict(LoadStage(self.canvases)).items() - {("canvases", self.canvases)}
        return json.dumps(dict(pair for pair in asdict(self).items() if pair not in unset))


@settings
class ExtensionConfig:
    """The settings in `--additional-config '{"vllm_dllm": {...}}'`."""

    window_rule: WindowRule = "reference"
    """Which keys a canvas row sees on sliding-window layers: `reference` (every row sees the last
    W-1 prefix tokens and the whole canvas, as transformers does) or `symmetric` (each row sees W-1
    tokens back and W-1 ahead, as stock vLLM does). A request may override it."""
    trace_path: PathName | None = None
    """File to which every step's canvases are appended as JSON lines, for watching them. None: no
    file. Costs a device-to-host copy a step. Only its owner can read it, because it holds clients'
    answers. Lines that cannot be written are dropped."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys of `requests.options`, for requests that do not set them."""
    sampling_memory_mib: Count = 256
    """Most memory, in MiB, that the sampler takes beside its results, whatever the number of
    requests."""
    self_conditioning_tolerance: Annotated[Number, Ge(0), Lt(1)] = 0.0
    """Share of a position's probability that its expected embedding may leave out in a step, in
    blocks of 1024 tokens of the vocabulary. 0 leaves out nothing."""
    self_conditioning_top_k: Count | None = None
    """Number of most probable tokens that expected embeddings are computed from. The log says how
    much probability the others had. None: all tokens."""
    fit_canvas: Boolean = True
    """Whether to denoise no canvas, first or last, wider than the tokens that its request may still
    get (rounded up to 16). The reference always denoises a whole canvas and drops the rest; so does
    this with false."""
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    """How a DFlash drafter of `--speculative-config` is used. Written as an object of the settings
    in `DrafterConfig`."""
    commit_last_block: Boolean = False
    """Whether to write the keys and values of an answer's last block, so that the next turn of a
    chat finds them in the prefix cache. Costs a forward an answer."""

    limits: RequestLimits = field(default_factory=RequestLimits)
    """What one request may ask for. Written as an object of the settings in `RequestLimits`."""
    load_stages: tuple[LoadStage, ...] = ()
    """Looser thresholds while the server is busy, for requests that allow it
    (`diffusion_load_stages`). Written as a list of objects, see `LoadStage`."""
    kernel_choice: KernelChoice = "shipped"
    """Which kernels run on a GPU. `shipped`: the fastest by times that come with this package.
    `measured`: the fastest by times that the first start on the machine measures, for at most 15 s,
    and keeps. `stock`: vLLM's own kernels and tiles of experts, and attention by Triton."""
    blocks_in_flight: Count = 1
    """Blocks of a masked model that are denoised together, and committed together. A block sees the
    unfinished blocks before it, and reveals early what the model is more certain of. More than 1 is
    for models whose blocks see themselves whole, such as SDAR and LLaDA2."""
    drain_seconds: Count = 15
    """Seconds that requests in flight have to finish when the server is told to stop, unless vLLM's
    `--shutdown-timeout` sets it."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that exclude each other, and for load stages out of
        order."""
        if self.self_conditioning_tolerance and self.self_conditioning_top_k:
            raise ValueError(
                "self_conditioning_tolerance and self_conditioning_top_k exclude each other. Set "
                "only one of them."
            )
        for earlier, later in pairwise(self.load_stages):
            if (
                later.canvases <= earlier.canvases
                or later.confidence_threshold < earlier.confidence_threshold
                or later.stability_threshold > earlier.stability_threshold
            ):
                raise ValueError(
                    f"load_stages must be ordered: each with more canvases than the one before, "
                    f"and no tighter threshold, got {later} after {earlier}. A threshold that is "
                    f"left out loosens nothing, so repeat those of the stage before."
                )

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "ExtensionConfig":
        """Returns the settings in the `vllm_dllm` entry of vLLM's additional config; all defaults
        if it is absent.

        Raises:
            ValueError: a setting is unknown or unusable, or stands beside the entry and not in it.
        """
        given = additional_config if isinstance(additional_config, Mapping) else {}
        section = {} if given.get(SECTION) is None else given[SECTION]
        if not isinstance(section, Mapping):
            return parse_settings(cls, section, f"{SECTION} in --additional-config")
        for name in section:
            if (group := _find_group(name)) not in (None, SECTION):
                raise _misplaced(name, group)
        _check_other_sections({name: given[name] for name in given if name != SECTION})
        return parse_settings(cls, section)


_COMMON_NAMES = {"buffer", "defaults", "drafter", "limits", "predictor", "schedule", "width"}
"""Names of our settings that other software has, too."""


def _find_group(name: str) -> str | None:
    """Returns what a setting of this name belongs under: "defaults", "drafter" or `SECTION`. None:
    we have no such setting."""
    ours = normalize_name(name)
    if ours.startswith("diffusion_"):
        return "defaults"
    if ours in DrafterConfig.__annotations__:
        return "drafter"
    return SECTION if ours in ExtensionConfig.__annotations__ else None


def _misplaced(name: str, group: str) -> ValueError:
    """Returns the error for a setting that is not in its group. Does not raise it."""
    ours = normalize_name(name)
    if ours == "diffusion_config":
        return ValueError(f"{name} in --additional-config has an option: --diffusion-config.")
    place = f'{{"{ours}": ...}}' if group == SECTION else f'{{"{group}": {{"{ours}": ...}}}}'
    return ValueError(
        f"{name} in --additional-config belongs under {group}: '{{\"{SECTION}\": {place}}}'."
    )


def _check_other_sections(config: Mapping[str, Any]) -> None:
    """Raises ValueError if a name in vLLM's additional config, beside our section, is one of our
    settings, in whatever object. Also if it looks like one, or like the section's name, and is in
    no object."""
    settings = ExtensionConfig.__annotations__
    sections = [config]
    for section in sections:  # which grows
        is_top = section is config
        common_names = _COMMON_NAMES.difference(settings if is_top else ())
        for name, value in section.items():
            group = None if normalize_name(name) in common_names else _find_group(name)
            if group is not None:
                raise _misplaced(name, group)
            if is_top and (near := nearest_name(name, (SECTION, *settings), 0.8)) is not None:
                raise ValueError(
                    f"{name} in --additional-config is not known. Did you mean {near}? The "
                    f"settings of diffusion models are under {SECTION}."
                )
            if normalize_name(name) == SECTION:
                raise ValueError(
                    f"{name} in --additional-config belongs at its top: '{{\"{SECTION}\": ...}}'."
                )
            sections += [value] if isinstance(value, Mapping) else []
