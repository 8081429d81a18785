"""The settings of a training run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What identifies a run, together with the target and the sequences."""

    block_size: int = 16
    """Slots of a block: the anchor and the tokens drafted after it."""
    num_layers: int = 3
    target_layer_ids: tuple[int, ...] | None = None
    """None: as many as the drafter has layers, spread as in the published drafters."""
    mask_token: str | None = None
    """A token that is never written; None: the tokenizer's mask token."""
    minutes: float | None = None
    steps: int | None = None
    """Exactly one of the two sets the length."""
    seed: int = 0
    max_tokens: int = 256
    """Longest answer."""
    blocks_per_sequence: int = 8
    """At most; each after a different anchor."""
    tokens_per_batch: int = 4096
    """Context and block slots of a step."""
    narrow_share: float = 0.25
    """Share of blocks narrower than block_size, so that short drafts are learnt as well."""
    muon_lr: float = 5e-3
    adam_lr: float = 2e-3
    weight_decay: float = 0.05
