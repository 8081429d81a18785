"""Model classes vLLM loads by name (see `vllm_dllm.plugin`)."""
