"""Stands in for a program that has no form for CPUs, in a rehearsal.

python -m bench.lease.gpu_only PROGRAM
"""

import importlib
import sys

if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    print(f"{sys.argv[1]} needs a GPU: it was imported, and not run")
