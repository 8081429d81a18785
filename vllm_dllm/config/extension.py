"""What vLLM has no option for: `--additional-config '{"vllm_dllm": {...}}'`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vllm_dllm.config.checks import check_boolean, check_count
from vllm_dllm.config.drafter import DrafterConfig
from vllm_dllm.config.files import check_path
from vllm_dllm.config.limits import RequestLimits
from vllm_dllm.config.load_stages import LoadStage, load_stages

WindowRule = Literal["reference", "symmetric"]
WINDOW_RULES: tuple[str, ...] = get_args(WindowRule)


@dataclass(frozen=True)
class ExtensionConfig:
    """What `--additional-config '{"vllm_dllm": {...}}'` sets."""

    window_rule: WindowRule = "reference"
    """Which keys a canvas row sees on sliding-window layers: `reference` (every row sees the last
    W-1 prefix tokens and the whole canvas, as transformers does) or `symmetric` (each row sees W-1
    tokens back and W-1 ahead, as stock vLLM does). A request may override it."""
    trace_path: str | None = None
    """File to which every step's canvases are appended as JSON lines, for watching a canvas
    denoise. Costs a device-to-host copy a step. Only its owner can read it, for it holds what
    clients get; lines that the disk does not take are dropped."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of `requests.keys.OPTIONS`' keys for requests that leave them out."""
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

    limits: RequestLimits = field(default_factory=RequestLimits)
    """What one request may ask for; from an object of its settings."""
    load_stages: tuple[LoadStage, ...] = ()
    """How much sooner canvases may be finished while the server is busy, for requests that allow it
    (`diffusion_load_stages`); from a list of objects, see `config.load_stages`."""
    drain_seconds: int = 15
    """For requests in flight to finish when the server is told to stop, unless vLLM's
    `--shutdown-timeout` says so."""

    def __post_init__(self) -> None:
        check_window_rule(self.window_rule)
        if self.trace_path is not None:
            check_path("trace_path", self.trace_path)
        if not isinstance(self.defaults, Mapping):
            raise ValueError(f"defaults must be an object, got {self.defaults!r}.")
        check_count("sampling_memory_mib", self.sampling_memory_mib)
        check_count("drain_seconds", self.drain_seconds)
        share, top_k = self.self_conditioning_tolerance, self.self_conditioning_top_k
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < 1:
            raise ValueError(
                f"self_conditioning_tolerance must be a number in [0, 1), got {share!r}."
            )
        if top_k is not None:
            check_count("self_conditioning_top_k", top_k)
        if share and top_k:
            raise ValueError(
                "self_conditioning_tolerance and self_conditioning_top_k exclude each other."
            )
        for name in ("fit_canvas", "commit_last_block"):
            check_boolean(name, getattr(self, name))

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
        if "limits" in values:
            values["limits"] = RequestLimits.from_section(values["limits"])
        if "load_stages" in values:
            values["load_stages"] = load_stages(values["load_stages"])
        return cls(**values)


def check_window_rule(rule: Any) -> None:
    """Raises ValueError unless `rule` names a window rule."""
    if rule not in WINDOW_RULES:
        raise ValueError(f"window rule must be one of {list(WINDOW_RULES)}, got {rule!r}.")
