"""Quantised checkpoints on a CPU, for which vLLM's build for CPUs lacks kernels.

It has none for NVFP4 or for quantised experts, and one for FP8 linears that is unbearably slow on
some processors. All are emulated here: weights stay packed in memory, and every call multiplies
exactly the values that a GPU's kernel multiplies.
"""
