"""The models that we serve, by the name that their `config.json` gives as their architecture."""

DIFFUSION_GEMMA = "DiffusionGemmaForBlockDiffusion"
MASKED_MODELS = {
    "SDARForCausalLM": "vllm_dllm.models.sdar",
    "SDARMoeForCausalLM": "vllm_dllm.models.sdar",
    "LLaDA2MoeModelLM": "vllm_dllm.models.llada2",
    "NemotronLabsDiffusionModel": "vllm_dllm.models.nemotron_labs",
    "Fast_dLLM_QwenForCausalLM": "vllm_dllm.models.fast_dllm",
}
"""And the module of each."""
