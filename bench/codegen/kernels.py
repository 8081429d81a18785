"""The Triton kernels of attention, sampler and experts, at the shapes of the 26B model; of masked
models, what the 26B model does not run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attention_kernels.support import FIRST_FP8_CAPABILITY
from bench.codegen import attention
from bench.codegen.case import Case
from vllm_dllm.denoise import draws_triton as draws
from vllm_dllm.denoise import expected_embedding_triton as embedding
from vllm_dllm.denoise import vocab_stream_triton as vocabulary
from vllm_dllm.denoise.vocab_stream import BLOCK
from vllm_dllm.experts import mixture_triton as experts
from vllm_dllm.experts import quantise_triton
from vllm_dllm.step.uniform import condition_triton, settle_triton

FP8 = "fp8e4nv"
LAYERS = {  # head size, query heads a key head, page
    "sliding layer": (256, 2, 16),
    "full layer": (512, 8, 32),
}
# Why a loop may spill, by layer, type of the cache and chip. Other tiles spill more, or cost more.
SPILLS = {
    ("sliding layer", "bf16", 80): "one or two loads of 1,140 instructions: registers hold results "
    "of 256 channels and queries",
    ("full layer", FP8, 100): "of a thread's registers, results on their way take 128, descriptors "
    "of 36 products some 70, and keys that become bf16 more than the rest",
}


def cases(chip: int) -> dict[str, Case]:
    """By name, in the order of the table."""
    of_experts = _experts() if chip == 90 else ()  # made for Hopper's products
    return dict((*_attention(chip), *_sampler(chip), *of_experts))


def _attention(chip: int) -> Iterator[tuple[str, Case]]:
    has_fp8 = divmod(chip, 10) >= FIRST_FP8_CAPABILITY
    for layer, (head_size, group, page) in LAYERS.items():
        for dtype in ("bf16", FP8) if has_fp8 else ("bf16",):
            cache = "fp8" if dtype == FP8 else dtype
            case = attention.attend(chip, head_size, group, page, dtype)
            spills = SPILLS.get((layer, dtype, chip), "")
            yield f"attention, {layer}, {cache}", replace(case, spills=spills)
        if chip == 90:
            case = attention.attend(chip, head_size, group, page, "bf16", images=True)
            yield f"attention, {layer}, bf16, images", case
    if chip == 90:  # layers of Qwen3, in SDAR with blocks of 32
        case = attention.attend(chip, 128, 4, 32, "bf16", verifies=True)
        yield "attention, masked layer, bf16, verifies", case
    yield "chunks for FlashAttention-4", attention.cut(page=16)
    yield "chunks for FlashAttention-4, images", attention.cut(page=16, images=True)


CANVAS, VOCABULARY = 256, 262_144
SAMPLER = {
    "output": "bf16",
    "needed": "i32",
    **dict.fromkeys(("temperature", "maximum", "total", "weighted"), "fp32"),
    **dict.fromkeys(("sums", "totals", "decay", "blocks", "entropy_nats", "best_logprob"), "fp32"),
    **dict.fromkeys(("best", "candidate", "best_guess", "drawn"), "i64"),
    # Of canvases and slots.
    **dict.fromkeys(("keys", "steps_done", "num_steps", "starts", "lengths", "first_rows"), "i64"),
    **dict.fromkeys(("renoise", "next_canvas", "slots", "numbers", "tokens", "canvas"), "i64"),
    **dict.fromkeys(("entropy", "settings", "counted"), "fp32"),
    **dict.fromkeys(("stage_confidence", "stage_stability", "t_min", "t_span"), "fp32"),
    **dict.fromkeys(("ends", "block_ends", "told"), "i32"),
    "stop_tokens": "i64",
    "uniform": "fp64",
    "flags": "i1",
    **dict.fromkeys(("soft_rows", "soft_embeds"), "bf16"),
}


LANES = 4096  # that hold a hidden size of 2,816
EMBEDDINGS = dict.fromkeys(("weight", "signal", "gate", "up", "plain", "change", "out"), "bf16") | {
    "committing": "i64",
    "first_tokens": "i64",
}


def _sampler(chip: int) -> Iterator[tuple[str, Case]]:
    yield "temperature and noise", draw()
    yield "vocabulary, read_blocks", read_blocks()
    yield "vocabulary, join_blocks", join_blocks()
    yield "self-conditioning, weigh", weigh()
    yield "self-conditioning, add", add_tile()
    yield "self-conditioning, add_needed, bf16", add_needed("bf16")
    yield "acceptance and next canvas", settle()
    yield "self-conditioning, store", store_soft()
    yield "self-conditioning, pre_norm", pre_norm()
    yield "self-conditioning, gate", gate()
    yield "self-conditioning, post_norm", post_norm()


def draw() -> Case:
    return Case(
        draws._temperature_and_noise_kernel,
        SAMPLER,
        {"PLACES": CANVAS},
    )


def read_blocks() -> Case:
    return Case(
        vocabulary._read_blocks_kernel,
        SAMPLER,
        {"BLOCK": BLOCK, "HAS_SOFTCAP": True},
        floats=("softcap",),
        multiples=("width",),
        options={"num_warps": 1},
    )


def join_blocks() -> Case:
    blocks = {"BLOCKS": VOCABULARY // BLOCK}
    return Case(vocabulary._join_blocks_kernel, SAMPLER, blocks)


def weigh() -> Case:
    blocks = VOCABULARY // BLOCK
    return Case(
        embedding._weigh_kernel,
        SAMPLER | {"logits": "bf16"},
        {"BLOCK": embedding._WEIGHED, "BLOCKS": blocks, "IS_FIRST": False},
        multiples=("width",),
        options={"num_warps": 16},
    )


def add_tile() -> Case:
    pointers = {"before": "fp32", "product": "bf16", "decay": "fp32", "found": "fp32"}
    constants = {"BLOCK": embedding._ADDED}
    return Case(embedding._add_kernel, pointers, constants, multiples=("width",))


def add_needed(dtype: str) -> Case:
    """`dtype`: Triton's name of the model's type."""
    rows, hidden, tokens = embedding._ROWS, embedding._HIDDEN, embedding._TOKENS
    return Case(
        embedding._add_needed_kernel,
        SAMPLER | dict.fromkeys(("logits", "embeddings"), dtype),
        {"BLOCK": BLOCK, "ROWS": rows, "HIDDEN": hidden, "TOKENS": tokens},
        multiples=("width", "hidden_size"),
        multiplies=dtype == "bf16",
        loads_ahead=dtype == "bf16",
        loop_flops=2 * rows * hidden * tokens,
    )


def settle() -> Case:
    flags = dict.fromkeys(("EMITS_LAST", "EMITS_OTHERS", "KEEPS_EMITTED"), True)
    constants = {**flags, "PLACES": CANVAS, "TILE": 16}
    return Case(settle_triton._settle_kernel, SAMPLER, constants, options={"num_warps": 8})


def store_soft() -> Case:
    return Case(
        settle_triton._store_soft_kernel, SAMPLER, {"HIDDEN": LANES}, multiples=("hidden_size",)
    )


def pre_norm() -> Case:
    return _condition(condition_triton._pre_norm_kernel, LANES=LANES)


def gate() -> Case:
    return _condition(condition_triton._gate_kernel, BLOCK=condition_triton._GATED)


def post_norm() -> Case:
    return _condition(condition_triton._post_norm_kernel, LANES=LANES)


def _condition(kernel: Any, **constants: int) -> Case:
    return Case(
        kernel,
        SAMPLER | EMBEDDINGS,
        constants,
        floats=("eps",),
        multiples=("hidden_size", "count"),
    )


EXPERTS = {
    **dict.fromkeys(("states", "weight", "inner", "rows", "output"), "bf16"),
    **dict.fromkeys(("state_scale", "inner_scale", "weight_scale", "weights"), "fp32"),
    **dict.fromkeys(("block_rows", "block_experts", "num_sorted"), "i32"),
}
WIDTHS = {"K": 2816, "N": 704}


def _experts() -> Iterator[tuple[str, Case]]:
    """A canvas' 2,048 rows in blocks of 32, and those of eight canvases and more."""
    for dtype, sizes in (("bf16", (32,)), (FP8, (32, 128, 144))):
        for size in sizes:
            name = f"{'fp8' if dtype == FP8 else dtype}, {size} rows"
            yield f"experts, gate_up, {name}", gate_up(dtype, size)
            yield f"experts, down, {name}", down(dtype, size)
    yield "experts, quantise", quantise()
    yield (
        "experts, sum",
        Case(experts._sum_kernel, EXPERTS, {"K": 2816, "TOP_K": 8, "BLOCK": experts._SUMMED}),
    )


def quantise() -> Case:
    return Case(
        quantise_triton._quantise_rows_kernel,
        {"rows": "bf16", "quantised": FP8, "scale": "fp32"},
        {"K": WIDTHS["K"], "BLOCK": LANES},
        options={"num_warps": 4},
    )


def gate_up(dtype: str, size: int) -> Case:
    """`dtype`: Triton's name of the weights' type."""
    tile = experts.choose_tiles(size).gate_up
    own = {"TOP_K": 8, "IS_GELU": True}
    return _product(experts._gate_up_kernel, dtype, size, tile, own, 2 * tile.channels)


def down(dtype: str, size: int) -> Case:
    tile = experts.choose_tiles(size).down
    return _product(experts._down_kernel, dtype, size, tile, {}, tile.channels)


def _product(
    kernel: Any, dtype: str, size: int, tile: experts.Tile, own: dict[str, int], channels: int
) -> Case:
    is_fp8 = dtype == FP8
    depth = tile.depth_bytes // (1 if is_fp8 else 2)
    constants: dict[str, object] = {**own, **WIDTHS, "CHANNELS": tile.channels}
    main = 1 << size.bit_length() - 1
    constants |= {"MAIN": main, "REST": size - main, "DEPTH": depth, "STAGES": tile.stages}
    read = "inner" if kernel is experts._down_kernel else "states"
    pointers = EXPERTS | dict.fromkeys((read, "weight"), dtype)
    if not is_fp8:
        constants |= dict.fromkeys(("state_scale", "inner_scale", "weight_scale"))
    return Case(
        kernel,
        pointers,
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        options={"num_warps": tile.num_warps},
        multiplies=True,
        loads_ahead=True,
        loop_flops=2 * channels * size * depth,
        passes=-(-WIDTHS["N" if kernel is experts._down_kernel else "K"] // depth),
    )
