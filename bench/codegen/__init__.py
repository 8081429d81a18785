"""What Triton makes of our kernels for GPUs that are not there: `attention_kernels/CODEGEN.md`."""
