"""`vllm-dllm drafter`: training of block-diffusion drafters and of their width predictors."""
