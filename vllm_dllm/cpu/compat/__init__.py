"""Private names of vLLM's that only CPUs need. See `vllm_dllm.compat`."""
