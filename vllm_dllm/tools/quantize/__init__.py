"""`vllm-dllm quantize`: FP8 and NVFP4 copies of DiffusionGemma checkpoints."""
