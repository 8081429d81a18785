"""Reads numbers from a server: tokens, denoise steps, and the memory of the weights."""

from dataclasses import dataclass
from typing import Any

import httpx

from vllm_dllm.errors import InputError
from vllm_dllm.tools.scrape import Change, Scrape, scrape
from vllm_dllm.tools.server_process import HOST

OPTIONS = ("--worker-extension-cls", f"{__name__}.WeightSizes")
ANSWER_SECONDS = 600.0  # that a server has to answer
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # enables /collective_rpc; only we use the server


@dataclass(frozen=True)
class Counters:
    """Counts what a server has done between two scrapes."""

    tokens: int  # generated
    forwards: int  # of canvases: denoise steps and commits
    steps_per_block: float | None
    """Denoise steps per canvas, as `vllm bench serve` computes them. They are exact if all canvases
    have the same width. None: the model has no canvases."""

    @classmethod
    def since(cls, before: Scrape, port: int) -> "Counters":
        """Returns the counts since the scrape `before` of the server at `port`. Raises InputError
        if the server does not answer."""
        change = Change(before, read_metrics(port))

        def total(name: str) -> int:
            return int(change.difference(f"vllm:{name}_total"))

        positions = total("diffusion_num_canvas_positions")  # computed by those forwards
        committed = total("diffusion_num_committed_tokens")  # those after an answer's end, too
        return cls(
            tokens=total("generation_tokens"),
            forwards=total("diffusion_num_denoising_steps"),
            steps_per_block=positions / committed - 1 if committed else None,
        )


def read_metrics(port: int) -> Scrape:
    """Returns the metrics of the server at `port`. Raises InputError if it does not answer."""
    return scrape(f"http://{HOST}:{port}", ANSWER_SECONDS)


def read_weight_bytes(port: int) -> int:
    """Returns the bytes of memory that the weights take in all workers together. Raises InputError
    if the server does not answer."""
    answer = post_json(port, "/collective_rpc", {"method": "weight_sizes"})
    return sum(worker["bytes"] for worker in answer.json()["results"])


def post_json(port: int, path: str, body: dict[str, object]) -> httpx.Response:
    """Returns the answer of the server at `port` to a request. Raises InputError unless it answers
    with 200 within `ANSWER_SECONDS`."""
    url = f"http://{HOST}:{port}{path}"
    try:
        answer = httpx.post(url, json=body, timeout=ANSWER_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        raise InputError(f"the server did not answer {path}: {error!r}") from error
    if answer.status_code != 200:
        raise InputError(f"the server answered {path} with {answer.status_code}: {answer.text}")
    return answer


class WeightSizes:
    """A worker extension of vLLM, which answers `/collective_rpc` for the method `weight_sizes`."""

    model_runner: Any  # that of the worker which this class extends

    def weight_sizes(self) -> dict[str, int]:
        """Returns the `bytes` of this worker's parameters. Tied parameters are counted once.
        Buffers, such as rotary embeddings, are not counted."""
        from vllm.model_executor.layers.linear import LinearBase  # takes seconds; only a worker's

        stored: dict[int, int] = {}
        packed = 0
        for module in self.model_runner.model.modules():
            for parameter in module.parameters(recurse=False):
                storage = parameter.untyped_storage()
                stored[storage.data_ptr()] = storage.nbytes()
            weight = getattr(module, "weight", None)
            if isinstance(module, LinearBase) and weight is not None and weight.numel() == 0:
                # A CPU kernel keeps the only copy, in its own layout and the same type.
                num_rows = getattr(module, "output_size_per_partition", module.output_size)
                num_columns = getattr(module, "input_size_per_partition", module.input_size)
                packed += num_rows * num_columns * weight.itemsize
        return {"bytes": sum(stored.values()) + packed}  # vLLM makes text of a plain number
