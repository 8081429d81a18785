"""The logits of tokens that a position may not take, from the least to the most forbidden, and the
bounds of others.

All have probability 0, and none is infinite, which would make NaN. Where nothing better is left, a
best guess is of the least forbidden kind.
"""

LARGEST_LOGIT = 1e10
"""The bound of all other tokens' logits after biases and penalties: with it, none comes near that
of an excluded token, at any temperature."""

BAD_WORD_LOGIT = -1e15
"""A token that would complete a bad word. Where every allowed token would, one of them is taken,
and no token that is excluded for another reason."""

MASKED_LOGIT = -1e20
"""A token that the request's sampling parameters exclude."""

ILLEGAL_LOGIT = 2 * MASKED_LOGIT
"""A token that a grammar excludes. Where sampling parameters exclude all legal tokens, one of these
is taken."""

TRUNCATED_LOGIT = -1e37
"""A token that top_k, top_p or min_p leaves out, or that does not exist. It is set after the
temperature. No temperature brings another forbidden token below it, so clamping to it raises
none."""

FP16_RANGE = (-65504.0, 65504.0)
"""To which logits are clamped in fp16: large biases, low temperatures would be infinite."""
