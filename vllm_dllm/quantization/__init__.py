"""Quantised checkpoints, in compressed-tensors' and ModelOpt's formats: which can be served, and
checks of their weights.

vLLM's own classes read the configuration, hold the weights and, on GPUs, compute. Kernels that its
build for CPUs lacks are in `vllm_dllm/cpu/quantization`.
"""
