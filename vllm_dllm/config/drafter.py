"""How drafts are made and how many of them are verified, read once at start-up.

`--speculative-config` names the drafter and how many tokens it drafts. Settings that vLLM has no
option for come with `--additional-config '{"vllm_dllm": {"drafter": {...}}}'`.
"""

from typing import Any, Literal

from vllm_dllm.config.checks import Boolean, Count, PathName, settings

WidthPolicy = Literal["fixed", "blockpilot", "acceptance", "load"]
Schedule = Literal["cosine", "linear", "sqrt"]


@settings
class DrafterConfig:
    """Settings of a DFlash drafter. Widths count the drafted tokens of a block, without its anchor,
    the token that is known: a block of 16 has a width of 15."""

    width_policy: WidthPolicy = "fixed"
    """How many of a request's drafts the target verifies. `fixed`: always `width`. `blockpilot`:
    what `predictor` says after the prefill. `acceptance`: fewer while under 60% are accepted, more
    while over 90% are, none where steps without drafts make more tokens a second. `load`: what the
    other requests of the step leave room for, see `load_rows`."""
    width: Count | None = None
    """Most drafts of a request that are verified. None: all that are drafted."""
    narrow_draft: Boolean = False
    """Whether to draft no more tokens than will be verified. The mask tokens of a block see each
    other, so a narrower block drafts differently. If not, all are drafted and the rest is
    dropped."""
    load_rows: Count = 128
    """With `load`: tokens of a step that the target computes at about the price of one. A batch
    that leaves each request less than one draft is served without drafts."""
    predictor: PathName | None = None
    """With `blockpilot`: folder of the predictor. None with the other policies."""
    max_context: Count | None = None
    """Requests with more tokens than this are served without drafts, and the drafter stores nothing
    of tokens beyond it. None: the length that the drafter's config says it was trained on
    (`dflash_config.trained_context`), else no limit."""
    draft_window: Count | None = None
    """How many of the last tokens the drafter sees. Cache blocks before them are freed. None: it
    sees all tokens."""
    draft_steps: Count = 1
    """Passes over a block. Each keeps its most confident tokens, which the next pass sees. More
    than one suits drafters trained for it; with others, acceptance falls."""
    schedule: Schedule = "cosine"
    """How many tokens each of several passes keeps."""
    buffer: PathName | None = None
    """Folder that some of the verified blocks are written to, for `vllm-dllm drafter train
    --from-buffer`. None: none are written."""
    buffer_mib: Count = 64
    """Largest size of `buffer` in MiB. Beyond it, the oldest blocks are deleted."""
    buffer_every: Count = 20
    """One of this many verified blocks is written."""

    def __post_init__(self) -> None:
        """Raises ValueError unless `blockpilot` and `predictor` are set together."""
        if (self.width_policy == "blockpilot") != (self.predictor is not None):
            raise ValueError(
                "drafter.width_policy 'blockpilot' and drafter.predictor, the folder that "
                "`vllm-dllm drafter calibrate-width` writes, come together; got "
                f"{self.width_policy!r} and {self.predictor!r}."
            )

    def max_width(self, num_drafted: int) -> int:
        """Returns the most drafts of a request that are verified. `num_drafted`: tokens that the
        drafter drafts for a request.

        Raises:
            ValueError: `width` is more than `num_drafted`.
        """
        if self.width is not None and self.width > num_drafted:
            raise ValueError(
                f"drafter.width is {self.width}, but num_speculative_tokens of "
                f"--speculative-config drafts {num_drafted}. Lower one or raise the other."
            )
        return self.width or num_drafted


def context_limit(config: DrafterConfig, speculative_config: Any, max_model_len: int) -> int:
    """Returns the tokens of the longest request that is drafted for. `speculative_config`: vLLM's,
    whose own `max_model_len` counts, too. `max_model_len`: the target's limit.

    Raises:
        ValueError: `dflash_config.trained_context` in the drafter's config.json is no integer >= 1.
    """
    if config.max_context is not None:
        return config.max_context
    draft = speculative_config.draft_model_config
    max_model_len = speculative_config.max_model_len or max_model_len
    own = getattr(draft.hf_config, "dflash_config", None) or {}
    trained = own.get("trained_context", max_model_len)
    if not isinstance(trained, int) or trained < 1:
        raise ValueError(
            f"dflash_config.trained_context of the drafter {draft.model} must be an "
            f"integer >= 1, got {trained!r}. Correct its config.json or set drafter.max_context."
        )
    return min(trained, max_model_len)
