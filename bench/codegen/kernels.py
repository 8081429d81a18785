"""The Triton kernels of attention and sampler, at the shapes of the 26B model."""

from collections.abc import Iterator

import triton

from attention_kernels import chunks, triton_fwd
from attention_kernels.support import FIRST_FP8_CAPABILITY
from bench.codegen.case import Case
from vllm_dllm.denoise import expected_embedding_triton as embedding
from vllm_dllm.denoise import vocab_stream_triton as vocabulary

FP8 = "fp8e4nv"
LAYERS = {  # head size, query heads a key head, page
    "sliding layer": (256, 2, 16),
    "full layer": (512, 8, 32),
}


def cases(chip: int) -> dict[str, Case]:
    """By name, in the order of the table."""
    return dict((*_attention(chip), *_sampler(chip)))


def _capability(chip: int) -> tuple[int, int]:
    return chip // 10, chip % 10


# --- attention ------------------------------------------------------------------------------

_ATTENTION = {
    **dict.fromkeys(("query", "output"), "bf16"),
    **dict.fromkeys(("block_table", "query_start_loc", "seq_lens", "causal", "symmetric"), "i32"),
    **dict.fromkeys(("key_scale", "value_scale", "partial_output", "partial_lse"), "fp32"),
    **dict.fromkeys(("chunk_start_loc", "chunk_seq_lens", "chunk_block_table", "bands"), "i32"),
}


def _attention(chip: int) -> Iterator[tuple[str, Case]]:
    has_fp8 = _capability(chip) >= FIRST_FP8_CAPABILITY
    for layer, (head_size, group, page) in LAYERS.items():
        for dtype in ("bf16", FP8) if has_fp8 else ("bf16",):
            cache = "fp8" if dtype == FP8 else dtype
            yield f"attention, {layer}, {cache}", _attend(chip, head_size, group, page, dtype)
    sizes = {"HQ": 16, "D": 512, "D_PADDED": 512, "SPLITS": 4, "SPLITS_PADDED": 4}
    yield "join of key splits", Case(triton_fwd._join_kernel, _ATTENTION, sizes)
    constants = {"CHUNK": chunks.CHUNK, "PAGE": 16, "PAGES_A_STEP": 128}
    yield "chunks for FlashAttention-4", Case(chunks._cut_kernel, _ATTENTION, constants)


def _attend(chip: int, head_size: int, group: int, page: int, cache: str) -> Case:
    cache_size = 2 if cache == "bf16" else 1
    tiles = triton_fwd.Tiles.choose(head_size, group, 2, cache_size, _capability(chip))
    padded = triton.next_power_of_2(head_size)
    constants = {
        "HQ": 2 * group,
        "GROUP": group,
        "HEADS": tiles.heads,
        "PARTS": triton.cdiv(group, tiles.heads),
        "D": head_size,
        "D_PADDED": padded,
        "PAGE": page,
        "BLOCK_Q": tiles.block_q,
        "BLOCK_N": tiles.block_n,
        "LAGS": tiles.lags,
        "SPLITS": 4,
        "HAS_WINDOW": head_size < 512,
        "HAS_SOFTCAP": False,
        "HAS_KEY_SCALE": cache != "bf16",
        "HAS_VALUE_SCALE": cache != "bf16",
    }
    return Case(
        triton_fwd._attention_kernel,
        _ATTENTION | dict.fromkeys(("key_cache", "value_cache"), cache),
        constants,
        floats=("scale", "softcap"),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        multiplies=True,
        loads_ahead=True,
        loop_flops=2 * 2 * tiles.block_q * tiles.heads * tiles.block_n * padded,
    )


# --- sampler --------------------------------------------------------------------------------

_SAMPLER = {
    "output": "bf16",
    "best": "i64",
    "candidate": "i64",
    "needed": "i32",
    **dict.fromkeys(("temperature", "within", "maximum", "total", "weighted"), "fp32"),
    **dict.fromkeys(("sums", "totals"), "fp32"),
}


def _sampler(chip: int) -> Iterator[tuple[str, Case]]:
    constants = {"BLOCK": vocabulary.BLOCK, "HAS_SOFTCAP": True}
    yield (
        "vocabulary, read_blocks",
        Case(
            vocabulary._read_blocks_kernel,
            _SAMPLER,
            constants,
            floats=("softcap",),
            multiples=("width",),
        ),
    )
    yield (
        "self-conditioning, weigh",
        Case(
            embedding._weigh_kernel,
            _SAMPLER | {"logits": "bf16"},
            {"BLOCK": embedding._WEIGHED},
            multiples=("width",),
            options={"num_warps": 8},
        ),
    )
    rows, hidden, tokens = embedding._ROWS, embedding._HIDDEN, embedding._TOKENS
    yield (
        "self-conditioning, add_needed, bf16",
        Case(
            embedding._add_needed_kernel,
            _SAMPLER | dict.fromkeys(("logits", "embeddings"), "bf16"),
            {"BLOCK": vocabulary.BLOCK, "ROWS": rows, "HIDDEN": hidden, "TOKENS": tokens},
            multiples=("width", "hidden_size"),
            multiplies=True,
            loads_ahead=True,
            loop_flops=2 * rows * hidden * tokens,
        ),
    )
