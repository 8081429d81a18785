"""The names that vLLM keeps private and only a CPU needs. See `vllm_dllm.compat`."""
