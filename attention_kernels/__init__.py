"""Attention for diffusion language models: tensors in, tensors out, no engine."""
