"""What a server reports about itself: tokens, denoise steps, memory of the weights."""

import http.client
import json
from dataclasses import dataclass

from vllm_dllm.errors import InputError
from vllm_dllm.tools.scrape import Change, Scrape, scrape
from vllm_dllm.tools.server_process import HOST

WEIGHT_SIZES = "vllm_dllm.tools.evaluate.weight_sizes.WeightSizes"
OPTIONS = ("--worker-extension-cls", WEIGHT_SIZES)
ANSWER_SECONDS = 600.0
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # enables /collective_rpc; only we use the server


@dataclass(frozen=True)
class Counters:
    """What a server has done between two scrapes."""

    tokens: int
    forwards: int  # denoise steps and commits
    steps_per_block: float | None
    """Denoise steps per canvas, as `vllm bench serve` computes them: exact if all canvases have the
    same width. None for a model without canvases."""

    @classmethod
    def since(cls, before: Scrape, port: int) -> "Counters":
        change = Change(before, read_metrics(port))

        def total(name: str) -> int:
            return int(change.of(f"vllm:{name}_total"))

        positions = total("diffusion_num_canvas_positions")  # computed by those forwards
        committed = total("diffusion_num_committed_tokens")  # those after an answer's end, too
        return cls(
            tokens=total("generation_tokens"),
            forwards=total("diffusion_num_denoising_steps"),
            steps_per_block=positions / committed - 1 if committed else None,
        )


def read_metrics(port: int) -> Scrape:
    return scrape(f"http://{HOST}:{port}", ANSWER_SECONDS)


def read_weight_bytes(port: int) -> int:
    """Asks how much memory the weights take in all workers together."""
    answer = _ask(port, "POST", "/collective_rpc", {"method": "weight_sizes"})
    return sum(worker["bytes"] for worker in json.loads(answer)["results"])


def warm_up(port: int, model: str) -> None:
    """Asks for a first answer, which takes longer than later ones."""
    _ask(port, "POST", "/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 16})


def _ask(port: int, method: str, path: str, body: dict[str, object] | None = None) -> str:
    # Not urllib: it would ask a proxy, if the environment names one.
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_SECONDS)
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
