"""The attention's kernels, at any shape. Needs no vLLM."""

import triton

from attention_kernels import chunks, triton_kernels
from attention_kernels.tiles import Tiles
from attention_kernels.triton_fwd import MIN_KEYS_PER_SPLIT
from bench.codegen.case import Case

_POINTERS = {
    **dict.fromkeys(("query", "output"), "bf16"),
    **dict.fromkeys(("block_table", "query_start_loc", "seq_lens", "causal", "symmetric"), "i32"),
    **dict.fromkeys(("key_scale", "value_scale", "partial_output", "partial_lse"), "fp32"),
    "arrivals": "i32",
    **dict.fromkeys(("chunk_start_loc", "chunk_seq_lens", "chunk_block_table", "bands"), "i32"),
}
_IMAGES = ("spans", "chunk_images")  # None without images


def attend(
    chip: int,
    head_size: int,
    group: int,
    page: int,
    cache: str,
    images: bool = False,
    tiles: Tiles | None = None,
    verifies: bool = False,
) -> Case:
    """`group`: query heads a key head; `cache`: Triton's name of its type; `tiles`: others than the
    chip's own; `verifies`: for masked models, which have no window."""
    cache_size = 2 if cache == "bf16" else 1
    if tiles is None:
        tiles = Tiles.choose(head_size, group, 2, cache_size, divmod(chip, 10))
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
        "LEAST_SHARE": MIN_KEYS_PER_SPLIT // tiles.block_n,
        "HAS_WINDOW": head_size < 512 and not verifies,
        "VERIFIES": verifies,
        "HAS_SOFTCAP": False,
        "HAS_KEY_SCALE": cache != "bf16",
        "HAS_VALUE_SCALE": cache != "bf16",
    }
    pointers, none = _with_images(images)
    return Case(
        triton_kernels._attention_kernel,
        pointers | dict.fromkeys(("key_cache", "value_cache"), cache),
        constants | none,
        floats=("scale", "softcap"),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        multiplies=True,
        loads_ahead=True,
        loop_flops=2 * 2 * tiles.block_q * tiles.heads * tiles.block_n * padded,
    )


def cut(page: int, images: bool = False) -> Case:
    constants: dict[str, int | None] = {"CHUNK": chunks.CHUNK, "PAGE": page, "PAGES_A_STEP": 128}
    pointers, none = _with_images(images)
    return Case(chunks._cut_kernel, pointers, constants | none)


def _with_images(images: bool) -> tuple[dict[str, str], dict[str, int | None]]:
    """Pointers and constants: without images, what they need is no argument of the kernel."""
    if images:
        return _POINTERS | dict.fromkeys(_IMAGES, "i32"), {}
    return _POINTERS, dict.fromkeys(_IMAGES)
