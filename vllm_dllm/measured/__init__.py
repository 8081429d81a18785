"""Kernels that a server times on its own GPU when it starts: `"kernel_choice": "measured"`."""
