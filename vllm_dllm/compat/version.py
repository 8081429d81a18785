"""Which vLLM this project runs with. It leans on vLLM's insides (`compat/`), so only on some."""

import vllm

SUPPORTED = "0.32"


def is_supported() -> bool:
    return vllm.__version__.split(".")[:2] == SUPPORTED.split(".")


def complaint() -> str:
    return (
        f"vllm-dllm supports vLLM {SUPPORTED}.*, found {vllm.__version__}. Diffusion models cannot "
        f"be served, other models are unaffected: install vLLM {SUPPORTED} or another vllm-dllm."
    )


def __getattr__(name: str) -> type:
    """Under an unsupported vLLM our models are registered as attributes of this module, so that
    serving one ends with the reason instead of silently using vLLM's own version of it."""
    if name.startswith("_"):
        raise AttributeError(name)
    raise RuntimeError(complaint())
