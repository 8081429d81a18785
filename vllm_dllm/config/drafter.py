"""How drafts are made and how many of them are verified, read once at start-up.

`--speculative-config` names the drafter and how many tokens it drafts; what vLLM has no option for
comes with `--additional-config '{"vllm_dllm": {"drafter": {...}}}'`.
"""

from typing import Any, Literal

from vllm_dllm.config.checks import Boolean, Count, PathName, settings

WidthPolicy = Literal["fixed", "blockpilot", "acceptance", "load"]
Schedule = Literal["cosine", "linear", "sqrt"]


@settings
class DrafterConfig:
    """Widths count drafted tokens, without the anchor: a block of 16 has a width of 15."""

    width_policy: WidthPolicy = "fixed"
    """How many of a request's drafts the target verifies: always `width`; what `predictor` says
    after the prefill (`blockpilot`); fewer while under 60% of them are accepted, more over 90%,
    none where steps without drafts make more tokens a second (`acceptance`); what the batch leaves
    room for (`load`)."""
    width: Count | None = None
    """Most drafts that are verified. None: all that are drafted."""
    narrow_draft: Boolean = False
    """Draft no more tokens than will be verified. The mask tokens of a block see each other, so a
    narrower block drafts differently; without this, all are drafted and the rest dropped."""
    load_rows: Count = 128
    """`load`: tokens of a step that the target computes at about the price of one. A batch whose
    requests have less than one draft each of them is served without drafts."""
    predictor: PathName | None = None
    """`blockpilot`: folder of the predictor."""
    max_context: Count | None = None
    """Requests of more tokens than this are served without drafts, and at their price: nothing
    beyond is stored for the drafter. None: what the drafter's config says that it was trained on
    (`dflash_config.trained_context`), else no limit."""
    draft_window: Count | None = None
    """The drafter sees this many of the last tokens; cache blocks behind them are freed."""
    draft_steps: Count = 1
    """Passes over a block: each keeps its surest tokens for the next to see. More than one suits
    drafters trained so; on others they lower acceptance."""
    schedule: Schedule = "cosine"
    """How many tokens each of several passes keeps."""
    buffer: PathName | None = None
    """Folder that some of the verified blocks are written to, for `vllm-dllm drafter train
    --from-buffer`."""
    buffer_mib: Count = 64
    """Size of `buffer`; its oldest blocks are deleted."""
    buffer_every: Count = 20
    """One block in this many is written."""

    def __post_init__(self) -> None:
        if (self.width_policy == "blockpilot") != (self.predictor is not None):
            raise ValueError(
                "drafter.width_policy 'blockpilot' and drafter.predictor, the folder that "
                "`vllm-dllm drafter calibrate-width` writes, come together; got "
                f"{self.width_policy!r} and {self.predictor!r}."
            )

    def widest(self, num_drafted: int) -> int:
        """Most drafts of a request that are verified, of `num_drafted`, the drafter's.

        Raises:
            ValueError: `width` is more than that.
        """
        if self.width is not None and self.width > num_drafted:
            raise ValueError(
                f"drafter.width is {self.width}, but num_speculative_tokens of "
                f"--speculative-config drafts {num_drafted}. Lower one or raise the other."
            )
        return self.width or num_drafted


def context_limit(config: DrafterConfig, draft_model_config: Any, max_model_len: int) -> int:
    """Tokens of the longest request that is drafted for. `draft_model_config` is vLLM's.

    Raises:
        ValueError: the drafter's config has no sensible number.
    """
    if config.max_context is not None:
        return config.max_context
    own = getattr(draft_model_config.hf_config, "dflash_config", None) or {}
    trained = own.get("trained_context", max_model_len)
    if not isinstance(trained, int) or trained < 1:
        raise ValueError(
            f"dflash_config.trained_context of the drafter {draft_model_config.model} must be an "
            f"integer >= 1, got {trained!r}. Mend its config.json or set drafter.max_context."
        )
    return min(trained, max_model_len)
