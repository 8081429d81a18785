"""How many requests of a checkpoint fit a GPU: `vllm-dllm plan`."""
