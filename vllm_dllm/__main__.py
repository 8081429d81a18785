"""`python -m vllm_dllm`: the command `vllm-dllm`, where it is not on the PATH."""

import sys

from vllm_dllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
