"""The kernels, and their tests, need PyTorch and Triton; vLLM and our extension may be absent."""

from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import output_of

# All of this folder's tests are imported, and some run, in a process that cannot import either.
PROGRAM = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "vllm_dllm"):
            raise ModuleNotFoundError(f"{name} is refused here", name=name)

sys.meta_path.insert(0, Refused())

import pytest

sys.exit(pytest.main(sys.argv[1:]))
"""
FAST = "test_api or test_masks"


@pytest.mark.slow
def test_without_vllm() -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "-k", FAST]
    output_of("-c", PROGRAM, *arguments, Path(__file__).parent, cwd=ROOT)
