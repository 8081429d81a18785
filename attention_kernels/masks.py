"""The definition of visibility, who may see whom, which every attention version is tested against.

A request's queries are its last `query_len` tokens; the tokens before them are its context. A
request is either causal (prefill, commit), bidirectional (a canvas being denoised), causal by
blocks of B tokens, counted from position 0 (all steps of masked models), or verifies a block of B
tokens. Its number in `causal` is 1, 0, B or -B: causal is causal by blocks of one token.
`window_left` is how many tokens back a query sees, not counting itself (a sliding window of W
tokens has `window_left = W - 1`); a negative value means no window.

| request          | rule        | a query at q sees the key at k iff                      |
|------------------|-------------|---------------------------------------------------------|
| causal by blocks | any         | q - window_left <= k < (q // B + 1) * B                 |
| bidirectional    | `reference` | k >= context_len - window_left                          |
| bidirectional    | `symmetric` | abs(q - k) <= window_left                               |
| verifies         | no window   | k <= q in its first block; k < q - B or k = q behind it |

A request that verifies has its first query in the block that it verifies, whose rows are causal. A
second copy of the block may follow, in the places of the next block: each of its rows stands in for
the row B places before, and sees the keys before that one, and its own.

`reference` is what transformers' DiffusionGemma does: the sliding layers' cache keeps the last
W - 1 tokens of the prefix, and the canvas attends to all of those and all of itself.

Whatever the rule, a query whose token belongs to an image also sees all keys of that image, those
after it and those beyond the window too: `spans` has the first key and the end of each query's
image, (0, 0) for a query of no image. This is what transformers' DiffusionGemma does with a prompt,
in all layers; Gemma 4 itself keeps the window and leaves its full layers causal. The keys that a
query sees stay one range, since its own is in both. Only rows of a second copy see two.

`reference.py`, the adapter for CPUs (`vllm_dllm/cpu/attention/backend.py`) and the picture of the
masks call the functions here. Kernels cannot. They restate the rules, and tests check that they
agree:

- `triton_kernels._visible` is `visible`: `test_triton.py::test_visibility`.
- `tiling.key_range` is `visible_range`: `test_triton.py::test_visits_all_keys_that_are_seen_...`.
  `tiling.images` and `tiling.with_images` are both functions' part about images.
- `chunks._cut_kernel` makes bands of `visible`: `test_chunks.py::test_no_page_in_vain`.
- `fa4_fwd.band_mask` and `fa4_fwd.image_mask` apply them: `test_fa4.py::test_mask_function`.
- vLLM's CPU kernel, for causal and `symmetric` requests: `test_cpu_backend.py::test_visibility`.
  Requests that are causal by blocks, and those with images, are cut into bidirectional ones
  (`cpu/attention/backend.py`).

FlashAttention-4 does not know blocks of more than one token, but a request that is causal by blocks
is a causal one whose blocks are images (`block_spans`). In one that verifies, a row sees its own
key, and the earlier ones that it sees are its image (`verifying_spans`).
"""

import torch


def visible(
    query_pos: torch.Tensor,  # int, any shape that broadcasts with key_pos
    key_pos: torch.Tensor,  # int
    context_len: torch.Tensor | int,  # tokens before the request's first query
    causal: torch.Tensor | int,  # 0 = bidirectional, else tokens of a block; 1 = causal; < 0:
    # verifies a block of so many tokens
    window_left: int,
    symmetric: torch.Tensor | bool = False,  # True: `symmetric` rule, False: `reference`
    spans: torch.Tensor | None = None,  # int, query_pos' shape and 2; None: no images
) -> torch.Tensor:
    """Returns whether each query sees each key, bool of the broadcast shape. The caller leaves out
    keys past the end of the request."""
    block = torch.as_tensor(causal, device=query_pos.device).long()
    verifying = verifying_end(query_pos, context_len, (-block).clamp(min=1))
    end_of_keys = torch.where(block < 0, verifying, block_end(query_pos, block))
    is_causal, seen = block != 0, (key_pos < end_of_keys) | (key_pos == query_pos)
    if window_left < 0:
        seen = seen | ~is_causal
    else:
        back = query_pos - key_pos
        symmetric_rule = back.abs() <= window_left
        reference_rule = key_pos >= context_len - window_left
        symmetric = torch.as_tensor(symmetric, device=query_pos.device)
        bidirectional = torch.where(symmetric, symmetric_rule, reference_rule)
        seen = torch.where(is_causal, seen & (back <= window_left), bidirectional)
    if spans is not None:
        first, end = spans.unbind(-1)
        seen = seen | ((key_pos >= first) & (key_pos < end))
    return seen


def block_end(
    position: torch.Tensor,  # int
    block: torch.Tensor,  # int, tokens of a block; less than 1 counts as 1
) -> torch.Tensor:
    """Returns the position after the last token of the block that holds `position`."""
    block = block.clamp(min=1)
    return (position // block + 1) * block


def verifying_end(
    query_pos: torch.Tensor,  # int
    context_len: torch.Tensor | int,  # tokens before the request's first query
    block: torch.Tensor | int,  # tokens of the block that is verified, at least 1
) -> torch.Tensor:
    """Returns the end of the keys from 0 on that each query of a verifying request sees."""
    first_copy = (context_len // block + 1) * block
    return torch.where(query_pos < first_copy, query_pos + 1, query_pos - block)


def block_spans(
    position: torch.Tensor,  # [T] int, of queries
    block: torch.Tensor | int,  # tokens of a block: [T] int, or the same for all
) -> torch.Tensor:
    """Returns [T, 2] int32: the `spans` with which a causal request without a window is causal by
    blocks. They may end behind the request."""
    first = position // block * block
    return torch.stack((first, first + block), dim=-1).int()


def verifying_spans(
    position: torch.Tensor,  # [T] int, of queries
    context_len: torch.Tensor,  # [T] int, tokens before the first query of each one's request
    block: int,  # tokens of the block that is verified
) -> torch.Tensor:
    """Returns [T, 2] int32: the `spans` of requests that verify, for FlashAttention-4."""
    end = verifying_end(position, context_len, block)
    return torch.stack((torch.zeros_like(end), end), dim=-1).int()


def visible_range(
    first_query: torch.Tensor,  # int, positions of the first and the last query of a tile
    last_query: torch.Tensor,
    context_len: torch.Tensor | int,
    seq_len: torch.Tensor | int,
    causal: torch.Tensor | int,
    window_left: int,
    symmetric: torch.Tensor | bool = False,
    spans: torch.Tensor | None = None,  # int [..., n, 2], of the tile's queries; None: no images
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first key that any query of a tile sees, and the end of the keys that they see.
    At least one query sees each key in between, so a kernel that visits only these visits none in
    vain, unless the request verifies."""
    block = torch.as_tensor(causal, device=first_query.device).long()
    causal = block != 0
    symmetric = torch.as_tensor(symmetric, device=first_query.device)
    context_len = torch.as_tensor(context_len, device=first_query.device)
    end_of_all = torch.as_tensor(seq_len, device=first_query.device)
    end_of_block = torch.minimum(block_end(last_query, block), end_of_all)
    start, end = torch.zeros_like(first_query), torch.where(causal, end_of_block, end_of_all)
    if window_left >= 0:
        moves = causal | symmetric  # the window moves with the query
        start = torch.where(moves, first_query, context_len) - window_left
        ahead = torch.where(~causal & symmetric, last_query + window_left + 1, end)
        end = torch.minimum(ahead, end_of_all)
    if spans is not None:
        first, past = spans.unbind(-1)
        start = torch.minimum(start, torch.where(past > 0, first, start[..., None]).amin(-1))
        end = torch.maximum(end, past.amax(-1))
    return start.clamp(min=0), end
