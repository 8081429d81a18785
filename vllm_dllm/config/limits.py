"""What one request may ask of a server that serves others at the same time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_dllm.config.checks import check_count


@dataclass(frozen=True)
class RequestLimits:
    """Named like what they limit. A request beyond one is answered with HTTP 400."""

    n: int = 64
    """Answers: `n` times the prompts of a completion."""
    prompt_logprobs: int = 2048
    """Log-probabilities of prompts: their tokens times one more than `prompt_logprobs`."""
    bad_words: int = 1024
    """Tokens of all `bad_words`."""
    logit_bias: int = 1024
    """Tokens that get a bias."""
    prediction: int = 32_768
    """Tokens of a predicted output. A server keeps room for as many requests as it runs at once."""
    canvas_length: int = 8
    """The least `diffusion_canvas_length`: a canvas takes as many steps for a few tokens as for
    many."""
    canvases: int | None = None
    """Canvases of one HTTP request in a step that others share; more take turns. None: 2 on CPUs,
    where each canvas makes a step longer; elsewhere a quarter of `--max-num-seqs`."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if (value := getattr(self, name)) is not None:
                check_count(f"limits.{name}", value)

    @classmethod
    def from_section(cls, section: Any) -> "RequestLimits":
        """Reads the `limits` entry of the extension's settings.

        Raises:
            ValueError: a key is unknown or a value out of range; names it and what is expected.
        """
        known = set(cls.__dataclass_fields__)
        if not isinstance(section, Mapping) or not set(section) <= known:
            raise ValueError(
                f"limits must be an object with the keys {sorted(known)}, got {section!r}."
            )
        return cls(**section)
