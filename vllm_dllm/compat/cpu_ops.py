"""vLLM's C++ operations for CPUs."""

from vllm import _custom_ops

write_cpu_kv_cache = _custom_ops.cpu_attn_reshape_and_cache

cpp_rms_norm = _custom_ops.rms_norm
