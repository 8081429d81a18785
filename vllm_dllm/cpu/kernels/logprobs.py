"""Native versions of the kernels that score prompt tokens, from `sample/logprob.py` and
`sample/prompt_logprob.py` of `vllm/v1/worker/gpu`. V = vocabulary."""

import torch

Grid = tuple[int, ...]


def topk_log_softmax(
    grid: Grid,  # (num_rows,)
    output: torch.Tensor,  # [num_rows, topk] fp32, written
    logits: torch.Tensor,  # [num_rows, V]
    logits_stride: int,
    topk_ids: torch.Tensor,  # [num_rows, topk] int64
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    **block_sizes: int,
) -> None:
    """Log-probabilities of chosen tokens, without those of the others."""
    scores = logits.float()
    torch.sub(scores.gather(1, topk_ids), scores.logsumexp(1, keepdim=True), out=output)


def ranks(
    grid: Grid,  # (num_rows,)
    output: torch.Tensor,  # [num_rows] int64, written
    logits: torch.Tensor,  # [num_rows, V]
    logits_stride: int,
    token_ids: torch.Tensor,  # [num_rows] int64
    vocab_size: int,
    **block_sizes: int,
) -> None:
    """How many tokens are at least as likely as each row's token, itself included."""
    chosen = logits.gather(1, token_ids[:, None].long())
    torch.sum(logits >= chosen, dim=1, out=output)


def prompt_logprobs_token_ids(
    grid: Grid,  # (num_reqs,)
    prompt_logprobs_token_ids: torch.Tensor,  # [num_tokens] int64, written
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1] int32
    idx_mapping: torch.Tensor,  # [num_reqs] int64, batch row -> slot
    num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len] int32
    all_token_ids_stride: int,
    **block_sizes: int,
) -> None:
    """The token that follows each scheduled one."""
    targets, tokens = prompt_logprobs_token_ids.numpy(), all_token_ids.view(-1).numpy()
    bounds = query_start_loc.tolist()
    computed = num_computed_tokens.numpy()
    for row, slot in enumerate(idx_mapping.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        # Flat, since the kernel reads past a row whose last token is scheduled.
        first = slot * all_token_ids_stride + int(computed[slot]) + 1
        following = tokens[first : first + end - begin]
        targets[begin : begin + len(following)] = following
        # Nothing follows the last slot's row; what that row is scored on is not reported.
        targets[begin + len(following) : end] = 0
