"""What only a GPU can show: bf16, real tensor cores, splits by themselves, CUDA graphs.

pytest -m gpu
"""

from dataclasses import replace

import pytest
import torch

from attention_kernels.api import FP8, attention
from attention_kernels.testing import PagedBatch, Request, allowed
from tests.unit.attention_kernels.test_triton import MIXES, VISIBILITY, seen_by_definition

pytestmark = pytest.mark.gpu

REQUESTS = [
    Request(256, 3000),
    Request(256, 700, symmetric=True),
    Request(256, 1500, causal=True),
    Request(0, 5),
    Request(77, 9000),
    Request(1, 0, causal=True),
    Request(700, 0, causal=True),
]
LAYERS = {  # query heads, key heads, head size, window_left
    "sliding layers of 26B": (16, 8, 256, 1023),
    "full layers of 26B": (16, 2, 512, -1),
    "small heads": (8, 2, 64, 100),
    "small heads, no window": (8, 2, 64, -1),
}
# What each version does of the layers and of the dtypes below.
CASES = [
    pytest.param(impl, layer, marks=[pytest.mark.fa4] if impl == "fa4" else [])
    for impl in ("triton", "fa4")
    for layer, (_, _, head_size, _) in LAYERS.items()
    if impl == "triton" or head_size <= 256
]
DTYPES = [torch.bfloat16, torch.float16]


def random_batch(layer: str, requests: list[Request], dtype: torch.dtype, page: int) -> PagedBatch:
    num_heads, num_kv_heads, head_size, _ = LAYERS[layer]
    return PagedBatch.random(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=page,
        dtype=dtype,
        device="cuda",
    )


def readable(batch: PagedBatch) -> PagedBatch:
    """With numbers where nothing was written: FlashAttention-4 multiplies whole pages by 0."""
    key_cache, value_cache = (t.nan_to_num(3.0) for t in (batch.key_cache, batch.value_cache))
    return replace(batch, key_cache=key_cache, value_cache=value_cache)


def given(batch: PagedBatch) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in batch.arguments().items() if tensor is not None}


def options(layer: str) -> dict[str, float]:
    _, _, head_size, window_left = LAYERS[layer]
    return {"scale": head_size**-0.5, "window_left": window_left}


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(("impl", "layer"), CASES)
@pytest.mark.parametrize("requests", [REQUESTS, [Request(256, 20_000)]], ids=["mixed", "one"])
def test_numbers(
    requests: list[Request], impl: str, layer: str, dtype: torch.dtype, page: int
) -> None:
    batch = random_batch(layer, requests, dtype, page)
    if impl == "fa4":
        batch = readable(batch)
    output = attention(**batch.arguments(), **options(layer), impl=impl)
    allowed(batch, **options(layer)).check(output)


@pytest.mark.fa4
@pytest.mark.parametrize(
    ("mix", "window_left", "page"), [case for case in VISIBILITY if case.values[0] != "blocks"]
)
def test_fa4_visibility(mix: str, window_left: int, page: int) -> None:
    D = 64
    batch = PagedBatch.random(
        MIXES[mix], num_heads=4, num_kv_heads=2, head_size=D, block_size=page, dtype=torch.float16
    )
    for first_key in range(0, int(batch.seq_lens.max()), D):
        probe = readable(batch.probe(first_key)).to("cuda")
        output = attention(**probe.arguments(), scale=1.0, window_left=window_left, impl="fa4")
        expected = seen_by_definition(batch, window_left, first_key)
        assert torch.equal(output.cpu() > 0, expected[:, None].expand_as(output))


@pytest.mark.fa4
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window_left", [-1, 0, 11])
def test_fa4_many_requests_and_caps(window_left: int, softcap: float) -> None:
    requests = [Request(1 + r % 70, 5 * r, causal=r % 2 == 0) for r in range(64)]
    batch = readable(
        PagedBatch.random(
            requests,
            num_heads=4,
            num_kv_heads=2,
            head_size=128,
            block_size=16,
            dtype=torch.bfloat16,
            device="cuda",
        )
    )
    settings = {"scale": 0.1, "window_left": window_left, "softcap": softcap}
    output = attention(**batch.arguments(), **settings, impl="fa4")
    allowed(batch, **settings).check(output)


@pytest.mark.fa4
def test_fa4_names_what_is_not_aligned() -> None:
    batch = random_batch("small heads", REQUESTS, torch.bfloat16, 16)
    wide = torch.nn.functional.pad(batch.key_cache, (0, 1))
    with pytest.raises(ValueError, match=r"takes a key_cache .* multiples of 16 bytes"):
        attention(
            **batch.arguments() | {"key_cache": wide[..., :-1]},
            **options("small heads"),
            impl="fa4",
        )


@pytest.mark.parametrize("layer", LAYERS)
def test_fp8_cache(layer: str) -> None:
    batch = random_batch(layer, REQUESTS, torch.bfloat16, 16)
    coarse = replace(
        batch, key_cache=batch.key_cache.to(FP8), value_cache=batch.value_cache.to(FP8)
    )
    scales = {
        "key_scale": torch.tensor([0.5], device="cuda"),
        "value_scale": torch.tensor([3.0], device="cuda"),
    }
    output = attention(**coarse.arguments(), **options(layer), **scales)
    allowed(coarse, **options(layer), **scales).check(output)


@pytest.mark.parametrize(("impl", "layer"), CASES)
def test_a_captured_graph_follows_its_tensors(impl: str, layer: str) -> None:
    first, second = (
        random_batch(layer, requests, torch.bfloat16, 16)
        for requests in (
            [Request(256, 2000), Request(256, 3000, causal=True), Request(256, 64)],
            [Request(256, 10, causal=True), Request(200, 3056), Request(100, 900, symmetric=True)],
        )
    )
    arguments = {name: tensor.clone() for name, tensor in given(first).items()}
    output = torch.zeros_like(first.query)
    attention(**arguments, **options(layer), output=output, impl=impl)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(**arguments, **options(layer), output=output, impl=impl)
    for batch in (second, first):
        for name, tensor in given(batch).items():
            if name in ("key_cache", "value_cache"):
                arguments[name][: len(tensor)] = tensor[: len(arguments[name])]
            elif name == "block_table":
                arguments[name][:, : tensor.shape[1]] = tensor[:, : arguments[name].shape[1]]
            else:
                arguments[name][: len(tensor)] = tensor
        graph.replay()
        allowed(batch, **options(layer)).check(output[: len(batch.query)])
