"""FP8 and NVFP4 checkpoints in the compressed-tensors format: which can be served, and how CPUs run
them.

vLLM's own classes read the configuration, hold the weights and, on GPUs, compute. Its CPU build
computes FP8 linears, but has no kernel for NVFP4 or for quantised experts. Those are emulated here:
weights stay packed in memory, and every call multiplies exactly the values that a GPU's kernel
multiplies.
"""
