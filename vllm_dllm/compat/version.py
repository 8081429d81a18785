"""Which versions of vLLM this project supports. It uses vLLM's private names (`compat/`), so it
depends on the version.

Differences between the known versions are handled in this package, by `is_at_least`.
"""

import os
import re

import vllm

KNOWN = ("0.32", "0.33")

AT_OWN_RISK = "VLLM_DLLM_UNKNOWN_VLLM"
"""The environment variable that, set to 1, allows a vLLM newer than the known ones."""


def is_at_least(release: str, version: str | None = None) -> bool:
    """Whether `version` is `release` ("0.33") or later. `version` None: the installed vLLM. A
    version without numbers, such as "dev", counts as later."""
    return _numbers(version or vllm.__version__, default=(1000, 0)) >= _numbers(release)


def is_known() -> bool:
    """Whether the installed vLLM is a version that this project was written for."""
    return any(_numbers(vllm.__version__) == _numbers(release) for release in KNOWN)


def can_serve() -> bool:
    """Whether our models may run here: vLLM is known, or newer and allowed by `AT_OWN_RISK`."""
    return is_known() or (_is_newer() and os.environ.get(AT_OWN_RISK) == "1")


def describe_unknown_vllm() -> str:
    """Returns the message about a vLLM that is not known, with what it means and what to do."""
    known = " and ".join(KNOWN)
    if can_serve():
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
    """Whether the installed vLLM is newer than the known ones."""
    return not is_known() and is_at_least(KNOWN[-1])


def _numbers(version: str, default: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Returns major and minor number of `version`, or `default` if it has none, as "dev" does."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else default


def __getattr__(name: str) -> type:
    """Raises RuntimeError that says why our models cannot be served, for names that begin with a
    capital letter. Our models are registered as attributes of this module where that is so, since
    vLLM would else serve its own version of one. Raises AttributeError for other names."""
    if not name[0].isupper():
        raise AttributeError(name)
    if can_serve():
        raise RuntimeError(
            f"vllm-dllm did not load with vLLM {vllm.__version__}, so diffusion models cannot be "
            "served. The log has the reason, after the line 'Failed to load plugin'."
        )
    raise RuntimeError(describe_unknown_vllm())
