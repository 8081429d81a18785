"""Block-diffusion drafters for lossless speculative decoding."""
