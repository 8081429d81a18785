"""FP8 and NVFP4 checkpoints in the compressed-tensors format: which are served, and how on a CPU.

vLLM's own classes read the configuration, hold the weights and, on GPUs, compute. Its CPU build
computes FP8 linears; it has no kernel for NVFP4 nor for quantised experts. Those are emulated here:
weights stay packed in memory, and every call multiplies the very values that a GPU's kernel
multiplies.
"""
