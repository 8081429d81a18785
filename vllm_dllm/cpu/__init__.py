"""All that only a CPU needs: no process on a GPU imports it, and its reader need not open it.

vLLM's model runner v2 does its bookkeeping in Triton kernels, and the package index has no Triton
compiler for CPUs. Here each kernel is replaced by native code that does the same (`kernels`,
`launch`). A kernel without a replacement runs in Triton's interpreter, and the log says so once.
Nothing changes in a process until a worker of model runner v2 starts in it (`worker`), so models
served by runner v1 never meet this code. Processes fork from one that has imported everything
(`forks`), attention knows the window rules (`attention`), quantised layers are emulated
(`quantization`), and vLLM's private names stand in `compat`.

Others name what is here by string, or import it in a function, once they know that this is a CPU.
"""
