"""What one request may ask of a server that serves others at the same time."""

from vllm_dllm.config.checks import Count, settings


@settings
class RequestLimits:
    """Named like what they limit. A request beyond one is answered with HTTP 400."""

    n: Count = 64
    """Answers: `n` times the prompts of a completion."""
    prompt_logprobs: Count = 2048
    """Log-probabilities of prompts: their tokens times one more than `prompt_logprobs`."""
    bad_words: Count = 1024
    """Tokens of all `bad_words`."""
    logit_bias: Count = 1024
    """Tokens that get a bias."""
    prediction: Count = 32_768
    """Tokens of a predicted output. A server keeps room for as many requests as it runs at once."""
    canvas_length: Count = 8
    """The least `diffusion_canvas_length`: a canvas takes as many steps for a few tokens as for
    many."""
    canvases: Count | None = None
    """Canvases of one HTTP request in a step that others share; more take turns. None: 2 on CPUs,
    where each canvas makes a step longer; elsewhere a quarter of `--max-num-seqs`."""
