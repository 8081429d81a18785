"""An out-of-tree vLLM extension that serves diffusion language models."""
