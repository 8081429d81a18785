"""FP8 and NVFP4 checkpoints in the compressed-tensors format: which can be served, and how CPUs run
them.

vLLM's own classes read the configuration, hold the weights and, on GPUs, compute. Its CPU build has
no kernel for NVFP4 or for quantised experts, and one for FP8 linears that some processors run
unbearably slowly. All are emulated here: weights stay packed in memory, and every call multiplies
exactly the values that a GPU's kernel multiplies.
"""
