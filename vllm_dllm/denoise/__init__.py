"""The denoising policy of a diffusion language model: pure functions, tensors in, tensors out.

Shape legend used throughout: n = requests being denoised, C = canvas length (tokens),
rows = the canvas positions of all n requests, concatenated, V = vocabulary size.

Nothing here imports an engine. The reference is transformers' `DiffusionGemmaGenerationMixin`
(generation_diffusion_gemma.py).
"""
