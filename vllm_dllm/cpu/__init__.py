"""Code that only CPUs need. No process on a GPU imports it.

vLLM's model runner v2 does its bookkeeping in Triton kernels, and the package index has no Triton
compiler for CPUs. Here each kernel is replaced by native code that does the same (`kernels`). A
kernel without a replacement runs in Triton's interpreter, and the log says so once. Nothing changes
in a process until a worker of model runner v2 starts in it (`worker`), so models served by runner
v1 never run this code. Engines and workers fork from a process that has imported everything
(`install`), attention handles the window rules (`attention`), quantised layers are emulated
(`quantization`), and vLLM's private names are in `compat`.

Other rooms name what is here by string, or import it in a function, once they know that this is a
CPU.
"""
