"""What a server reports about itself: tokens, denoise steps, memory of the weights."""

import http.client
import json
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from vllm_dllm.errors import InputError
from vllm_dllm.tools.server_process import HOST

WEIGHT_SIZES = "vllm_dllm.tools.evaluate.weight_sizes.WeightSizes"
OPTIONS = ("--worker-extension-cls", WEIGHT_SIZES)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # enables /collective_rpc; only we use the server


@dataclass(frozen=True)
class Counters:
    """What the server has done since its start."""

    tokens: int
    forwards: int  # denoise steps and commits
    canvas_positions: int  # computed by those forwards
    committed: int  # tokens in blocks, including those after the end of an answer

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(
            self.tokens - before.tokens,
            self.forwards - before.forwards,
            self.canvas_positions - before.canvas_positions,
            self.committed - before.committed,
        )

    def steps_per_block(self) -> float | None:
        """Denoise steps per canvas, as `vllm bench serve` computes them: exact if all
        canvases have the same width. None for a model without canvases."""
        if not self.committed:
            return None
        return self.canvas_positions / self.committed - 1


def read_counters(port: int) -> Counters:
    text = _ask(port, "GET", "/metrics")
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value

    def total(name: str) -> int:
        return int(totals.get(f"vllm:{name}_total", 0))

    return Counters(
        tokens=total("generation_tokens"),
        forwards=total("diffusion_num_denoising_steps"),
        canvas_positions=total("diffusion_num_canvas_positions"),
        committed=total("diffusion_num_committed_tokens"),
    )


def read_weight_bytes(port: int) -> int:
    """Of all workers together."""
    answer = _ask(port, "POST", "/collective_rpc", {"method": "weight_sizes"})
    return sum(worker["bytes"] for worker in json.loads(answer)["results"])


def warm_up(port: int, model: str) -> None:
    """Asks for a first answer, which takes longer than later ones."""
    _ask(port, "POST", "/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 16})


def _ask(port: int, method: str, path: str, body: dict[str, object] | None = None) -> str:
    # Not urllib: it would ask a proxy, if the environment names one.
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        text = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"the server did not answer {path}: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise InputError(f"the server answered {path} with {response.status}: {text}")
    return text
