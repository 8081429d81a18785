"""Stock vLLM's Triton attention, with the arguments and tiles that it takes for a canvas: see
`unified_attention` in `vllm/v1/attention/ops/triton_unified_attention.py` (vLLM 0.32).

It is what stock runs where vLLM has no FlashAttention-4, whose code Triton cannot show.
"""

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from unittest import mock

import triton

from bench.codegen.case import Case

_OPS = "vllm.v1.attention.ops."
_POINTERS = {
    **dict.fromkeys(
        ("output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"),
        "bf16",
    ),
    **dict.fromkeys(
        (
            "block_tables_ptr",
            "seq_lens_ptr",
            "per_seq_causal_ptr",
            "rswa_prefix_lens_ptr",
            "query_start_len_ptr",
        ),
        "i32",
    ),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), "fp32"),
}
_ABSENT = (
    *(f"{name}_ptr" for name in ("sink", "alibi_slopes", "qq_bias", "mm_prefix_range")),
    *(f"segm_{name}_ptr" for name in ("output", "max", "expsum")),
    *(f"{name}_scale_cache_ptr" for name in "kv"),
    *(f"stride_{name}s_{part}" for name in "kv" for part in ("blk", "slot", "head")),
)
_OFF = (
    *(f"USE_{name}" for name in ("ALIBI_SLOPES", "ALIBI_SQRT", "QQ_BIAS", "SOFTCAP", "SINKS")),
    *(f"USE_{name}" for name in ("MM_PREFIX", "R_SWA", "FP8", "TD", "TD_QO")),
    *("IS_3D", "Q_IS_FP8", "MM_PREFIX_CLAMP_SW"),
)


def attend(chip: int, head_size: int, group: int, page: int, window: int) -> Case:
    """`window`: tokens, itself included; 0: none."""
    rows, keys, options = max(16, triton.next_power_of_2(group)), 32, {"num_warps": 4}
    if head_size == 256 and chip // 10 == 10:
        rows, keys, options = 32, 128, {"num_warps": 8, "num_stages": 2}
    module = _module()
    constants = {
        **dict.fromkeys(_ABSENT),
        **dict.fromkeys(_OFF, False),
        "num_query_heads": 2 * group,
        "num_queries_per_kv": group,
        "BLOCK_SIZE": page,
        "TILE_SIZE": keys,
        "HEAD_SIZE": head_size,
        "HEAD_SIZE_PADDED": triton.next_power_of_2(head_size),
        "SLIDING_WINDOW": window,
        "USE_CAUSAL": True,
        "USE_PER_SEQ_CAUSAL": True,
        "MAX_MM_RANGES": 0,
        "R_SWA_WINDOW": 0,
        **{f"stride_{name}_cache_3": 1 for name in "kv"},
        "BLOCK_Q": rows // group,
        "BLOCK_M": rows,
        "NUM_SEGMENTS_PER_SEQ": 1,
        "KV_QUANT_MODE": 0,
        "FP8_MIN": module.float8_info.min,
        "FP8_MAX": module.float8_info.max,
        "CHUNK_LOOKBACK": -1,
        "CHUNK_SIZE": -1,
    }
    return Case(
        module.kernel_unified_attention,
        _POINTERS,
        constants,
        floats=("scale", "out_scale", "softcap"),
        options=options,
        loop_flops=2 * 2 * rows * keys * triton.next_power_of_2(head_size),
        is_ours=False,
    )


@cache
def _module() -> ModuleType:
    """vLLM's module, with Triton even where vLLM believes that it has none. Nobody else sees it."""
    for name in ("platforms", "v1.kv_cache_interface"):  # they load much, which is to stay loaded
        importlib.import_module(f"vllm.{name}")
    real = ModuleType("vllm.triton_utils")
    vars(real).update(triton=triton, tl=triton.language)
    with mock.patch.dict(sys.modules, {real.__name__: real}):
        _load(_OPS + "triton_attention_helpers")
        return _load(_OPS + "triton_unified_attention")


def _load(name: str) -> ModuleType:
    sys.modules.pop(name, None)
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
