"""Checkpoints in the compressed-tensors format: which can be served, and what of them is checked.

vLLM's own classes read the configuration, hold the weights and, on GPUs, compute. What its build
for CPUs lacks is in `vllm_dllm/cpu/quantization`.
"""
