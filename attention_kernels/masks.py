"""Who may see whom: the one definition of visibility, which every attention version is tested by.

A request's queries are its last `query_len` tokens; the tokens before them are its context. A
request is either causal (prefill, commit) or bidirectional (a canvas being denoised). `window_left`
counts the tokens a query sees back, not counting itself (a sliding window of W tokens has
`window_left = W - 1`); a negative value means no window.

| request       | rule        | a query at q sees the key at k iff            |
|---------------|-------------|-----------------------------------------------|
| causal        | any         | q - window_left <= k <= q                     |
| bidirectional | `reference` | k >= context_len - window_left                |
| bidirectional | `symmetric` | abs(q - k) <= window_left                     |

`reference` is what transformers' DiffusionGemma does: the sliding layers' cache keeps the last
W - 1 tokens of the prefix, and the canvas attends to all of that and all of itself.
"""

import torch


def visible(
    query_pos: torch.Tensor,  # int, any shape that broadcasts with key_pos
    key_pos: torch.Tensor,  # int
    context_len: torch.Tensor | int,  # tokens before the request's first query
    causal: torch.Tensor | bool,
    window_left: int,
    symmetric: torch.Tensor | bool = False,  # True: `symmetric` rule, False: `reference`
) -> torch.Tensor:
    """Visibility, bool, of the broadcast shape. Keys past the end of the request are the caller's
    to leave out."""
    causal = torch.as_tensor(causal, device=query_pos.device)
    symmetric = torch.as_tensor(symmetric, device=query_pos.device)
    back = query_pos - key_pos
    if window_left < 0:
        return (back >= 0) | ~causal
    causal_rule = (back >= 0) & (back <= window_left)
    symmetric_rule = back.abs() <= window_left
    reference_rule = key_pos >= context_len - window_left
    return torch.where(causal, causal_rule, torch.where(symmetric, symmetric_rule, reference_rule))
