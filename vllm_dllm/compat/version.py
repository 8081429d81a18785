"""Which vLLM this project runs with. It leans on vLLM's insides (`compat/`), so it knows versions.

Differences between the known versions are handled in this package, by `is_at_least`.
"""

import os
import re

import vllm

KNOWN = ("0.32", "0.33")

AT_OWN_RISK = "VLLM_DLLM_UNKNOWN_VLLM"
"""The environment variable that, set to 1, lets a vLLM newer than the known ones through."""


def is_at_least(release: str, version: str | None = None) -> bool:
    """Whether vLLM, or its `version`, is of `release`, such as "0.33", or later. So is a build
    without a version."""
    return _numbers(version or vllm.__version__, default=(1000, 0)) >= _numbers(release)


def is_known() -> bool:
    return any(_numbers(vllm.__version__) == _numbers(release) for release in KNOWN)


def is_served() -> bool:
    """Whether our models may run with this vLLM: known, or tried at the user's own risk."""
    return is_known() or (_is_newer() and os.environ.get(AT_OWN_RISK) == "1")


def complaint() -> str:
    """What to say of a vLLM that is not known."""
    known = " and ".join(KNOWN)
    if is_served():
        return (
            f"vllm-dllm knows vLLM {known}, found {vllm.__version__}. It goes on because "
            f"{AT_OWN_RISK} is set: answers may be wrong."
        )
    if _is_newer():
        remedy = f"install vLLM {KNOWN[-1]} or a newer vllm-dllm, or set {AT_OWN_RISK}=1 to go on "
        remedy += "at your own risk."
    else:
        remedy = f"install vLLM {' or '.join(KNOWN)}, or an older vllm-dllm."
    return (
        f"vllm-dllm knows vLLM {known}, found {vllm.__version__}. Diffusion models cannot be "
        f"served, other models are unaffected: {remedy}"
    )


def _is_newer() -> bool:
    return not is_known() and is_at_least(KNOWN[-1])


def _numbers(version: str, default: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Major and minor number of `version`; `default` if it has none, like "dev"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else default


def __getattr__(name: str) -> type:
    """Where our models cannot be served, they are registered as attributes of this module, so that
    serving one ends with the reason instead of silently using vLLM's own version of it."""
    if not name[0].isupper():
        raise AttributeError(name)
    if is_served():
        raise RuntimeError(
            f"vllm-dllm did not load with vLLM {vllm.__version__}, so diffusion models cannot be "
            "served: the log says why, where it says that it failed to load the plugin."
        )
    raise RuntimeError(complaint())
