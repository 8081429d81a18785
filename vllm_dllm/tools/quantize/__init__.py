"""`vllm-dllm quantize`: writes quantised copies of checkpoints."""
