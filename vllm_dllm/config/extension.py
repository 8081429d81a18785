"""What vLLM has no option for: `--additional-config '{"vllm_dllm": {...}}'`."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from vllm_dllm.config.checks import Boolean, Count, Number, PathName, nearest, read, settings
from vllm_dllm.config.drafter import DrafterConfig
from vllm_dllm.config.limits import RequestLimits
from vllm_dllm.config.load_stages import LoadStage, check_order

WindowRule = Literal["reference", "symmetric"]
SECTION = "vllm_dllm"
"""Of vLLM's additional config."""


@settings
class ExtensionConfig:
    """What `--additional-config '{"vllm_dllm": {...}}'` sets."""

    window_rule: WindowRule = "reference"
    """Which keys a canvas row sees on sliding-window layers: `reference` (every row sees the last
    W-1 prefix tokens and the whole canvas, as transformers does) or `symmetric` (each row sees W-1
    tokens back and W-1 ahead, as stock vLLM does). A request may override it."""
    trace_path: PathName | None = None
    """File to which every step's canvases are appended as JSON lines, for watching a canvas
    denoise. Costs a device-to-host copy a step. Only its owner can read it, for it holds what
    clients get; lines that the disk does not take are dropped."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of `requests.options`' keys for requests that leave them out."""
    sampling_memory_mib: Count = 256
    """Bounds what the sampler takes beside its results, whatever the number of requests."""
    self_conditioning_tolerance: Annotated[Number, Ge(0), Lt(1)] = 0.0
    """Share of a position's probability that its expected embedding may leave out in a step, in
    blocks of 1024 tokens. 0 leaves out nothing."""
    self_conditioning_top_k: Count | None = None
    """Make the expected embedding of the k most probable tokens alone; the log says how much
    probability the others had. None: of all tokens."""
    fit_canvas: Boolean = True
    """Denoise no canvas, first or last, wider than the tokens that its request may still get
    (rounded up to 16). The reference always denoises a whole canvas and drops the rest; so does
    this with false."""
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    """How a DFlash drafter of `--speculative-config` is used; from an object of its settings."""
    commit_last_block: Boolean = False
    """Write the keys and values of an answer's last block, so that the next turn of a chat finds
    them in the prefix cache. Costs a forward an answer."""

    limits: RequestLimits = field(default_factory=RequestLimits)
    """What one request may ask for; from an object of its settings."""
    load_stages: tuple[LoadStage, ...] = ()
    """How much sooner canvases may be finished while the server is busy, for requests that allow it
    (`diffusion_load_stages`); from a list of objects, see `config.load_stages`."""
    drain_seconds: Count = 15
    """For requests in flight to finish when the server is told to stop, unless vLLM's
    `--shutdown-timeout` says so."""

    def __post_init__(self) -> None:
        if self.self_conditioning_tolerance and self.self_conditioning_top_k:
            raise ValueError(
                "self_conditioning_tolerance and self_conditioning_top_k exclude each other."
            )
        check_order(self.load_stages)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "ExtensionConfig":
        """Reads the `vllm_dllm` entry of vLLM's additional config; absent means all defaults."""
        given = additional_config if isinstance(additional_config, Mapping) else {}
        for name in given:
            _check_place(name, cls.__annotations__)
        return read(cls, given[SECTION] if given.get(SECTION) is not None else {})


def _check_place(name: str, settings: Iterable[str]) -> None:
    """Raises ValueError for a name beside our section that is meant for it, or for one in it."""
    if name in settings:
        place = f'{{"{SECTION}": {{"{name}": ...}}}}'
        raise ValueError(f"{name} in --additional-config belongs under {SECTION}: '{place}'.")
    if name != SECTION and (near := nearest(name, (SECTION, *settings), 0.8)) is not None:
        raise ValueError(
            f"{name} in --additional-config is not known. Did you mean {near}? The settings of "
            f"diffusion models are under {SECTION}."
        )
