"""The Triton kernels of attention and sampler, and stock vLLM's attention, at the shapes of the 26B
model."""

from collections.abc import Iterator
from dataclasses import replace

from attention_kernels.support import FIRST_FP8_CAPABILITY
from bench.codegen import attention, stock
from bench.codegen.case import Case
from vllm_dllm.denoise import expected_embedding_triton as embedding
from vllm_dllm.denoise import vocab_stream_triton as vocabulary

FP8 = "fp8e4nv"
LAYERS = {  # head size, query heads a key head, page
    "sliding layer": (256, 2, 16),
    "full layer": (512, 8, 32),
}
PREDICTED = (90, 100)  # chips of `bench.roofline`, which compares with stock's
WINDOW = 1024  # of sliding layers, tokens
# Why a loop may spill, by layer, type of the cache and chip. Other tiles spill more, or cost more.
SPILLS = {
    ("full layer", FP8, 100): "of a thread's registers, results on their way take 128, descriptors "
    "of 36 products some 70, and keys that become bf16 more than the rest",
}


def cases(chip: int) -> dict[str, Case]:
    """By name, in the order of the table."""
    kernels = dict((*_attention(chip), *_sampler(chip)))
    return kernels | dict(_stock(chip)) if chip in PREDICTED else kernels


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
    yield "join of key splits", attention.join(head_size=512, group=8)
    yield "chunks for FlashAttention-4", attention.cut(page=16)
    yield "chunks for FlashAttention-4, images", attention.cut(page=16, images=True)


SAMPLER = {
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
            SAMPLER,
            constants,
            floats=("softcap",),
            multiples=("width",),
        ),
    )
    yield (
        "self-conditioning, weigh",
        Case(
            embedding._weigh_kernel,
            SAMPLER | {"logits": "bf16"},
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
            SAMPLER | dict.fromkeys(("logits", "embeddings"), "bf16"),
            {"BLOCK": vocabulary.BLOCK, "ROWS": rows, "HIDDEN": hidden, "TOKENS": tokens},
            multiples=("width", "hidden_size"),
            multiplies=True,
            loads_ahead=True,
            loop_flops=2 * rows * hidden * tokens,
        ),
    )


def _stock(chip: int) -> Iterator[tuple[str, Case]]:
    for layer, (head_size, group, page) in LAYERS.items():
        window = WINDOW if layer == "sliding layer" else 0
        case = stock.attend(chip, head_size, group, page, window)
        yield f"stock vLLM's attention, {layer}, bf16", case
