"""The logits of tokens that a position may not take, from the least to the most forbidden.

All have probability 0, and none is infinite, which would make NaN. Where nothing better is left, a
best guess is of the least forbidden kind.
"""

LARGEST_LOGIT = 1e10
"""Bounds the logits of all other tokens, whatever biases and penalties make of them: none comes
near an excluded one, at any temperature."""

BAD_WORD_LOGIT = -1e15
"""A token that would complete a bad word: where each allowed token completes one, an answer keeps
to what is allowed."""

MASKED_LOGIT = -1e20
"""A token that the request's sampling parameters exclude."""

ILLEGAL_LOGIT = 2 * MASKED_LOGIT
"""A token that a grammar excludes: candidates are legal where sampling parameters leave nothing
legal."""

TRUNCATED_LOGIT = -1e37
"""A token that top_k, top_p or min_p leaves out, or that does not exist; set after the temperature.
No temperature brings another forbidden token below it, so clamping to it raises none."""
