"""Reads numbers from a server: its metrics, on `/metrics`, how they have changed, and the memory of
its weights."""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_dllm.errors import InputError
from vllm_dllm.tools.server_process import HOST

TIMEOUT_SECONDS = 5.0  # that a server has to answer
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Scrape:
    """All samples of a server's metrics at one time."""

    at: float  # time of the scrape, seconds of the monotonic clock
    samples: Mapping[str, list[tuple[Labels, float]]]  # name -> labels and value of each

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples of a name that have all of the labels; 0 if no sample
        has."""
        return sum(
            value for own, value in self.samples.get(name, ()) if labels.items() <= own.items()
        )

    def totals_by(self, name: str, label: str) -> dict[str, float]:
        """Returns the sum of the samples of a name for each value of a label, in the server's
        order. Raises KeyError if a sample lacks the label."""
        totals: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            totals[labels[label]] = totals.get(labels[label], 0.0) + value
        return totals

    def has_restarted_since(self, earlier: "Scrape") -> bool:
        """Returns whether the server has been started anew since an earlier scrape: it counts fewer
        forwards."""
        name = "vllm_dllm:forwards_total"
        return self.total(name) < earlier.total(name)


@dataclass(frozen=True)
class Change:
    """The changes of metrics between two scrapes."""

    before: Scrape | None  # None: the changes since the server's start
    now: Scrape

    def difference(self, name: str, **labels: str) -> float:
        """Returns how much the total of a metric's samples with these labels has changed."""
        before = self.before.total(name, **labels) if self.before is not None else 0.0
        return self.now.total(name, **labels) - before

    def ratio(self, name: str, per: str) -> float | None:
        """Returns the change of `name` divided by the change of `per`; None if the latter is 0."""
        whole = self.difference(per)
        return self.difference(name) / whole if whole else None

    def mean(self, histogram: str) -> float | None:
        """Returns the mean of the values that a histogram has got between the scrapes; None if it
        got none."""
        return self.ratio(f"{histogram}_sum", f"{histogram}_count")

    def rate(self, name: str) -> float | None:
        """Returns the change of a total per second; None for changes since the server's start."""
        if self.before is None or self.now.at <= self.before.at:
            return None
        return self.difference(name) / (self.now.at - self.before.at)

    def shares(self, name: str, label: str) -> dict[str, float]:
        """Returns the share of a metric's change that each value of a label has. Values without a
        change are left out."""
        changes = {
            value: self.difference(name, **{label: value})
            for value in self.now.totals_by(name, label)
        }
        whole = sum(changes.values())
        return {value: part / whole for value, part in changes.items() if part} if whole else {}


def scrape(url: str, timeout_s: float = TIMEOUT_SECONDS) -> Scrape:
    """Returns the metrics of the server at `url`. Raises InputError, which says what to do, if no
    server answers within `timeout_s` seconds, the answer is an error or no list of metrics, or
    `url` is no URL."""
    samples: dict[str, list[tuple[Labels, float]]] = {}
    client = _client(url.partition(":")[0])
    try:
        answer = client.get(f"{url}/metrics", timeout=timeout_s)
        for family in text_string_to_metric_families(answer.raise_for_status().text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except httpx.UnsupportedProtocol as error:
        raise InputError(f"--url must be like http://127.0.0.1:8000, got '{url}'.") from error
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise InputError(
            f"the server at {url} answers /metrics with HTTP {status}: it is not vLLM, or "
            f"--url has a path that it must not have, such as /v1."
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(
            f"no server answers at {url} ({error}). Start one, or name its address with --url."
        ) from error
    except ValueError as error:
        raise InputError(f"{url}/metrics is not a list of metrics ({error}).") from error
    return Scrape(time.monotonic(), samples)


def scrape_canvases(url: str) -> Scrape:
    """Returns the metrics of a diffusion model's server. Raises InputError if no such server
    answers at `url`."""
    metrics = scrape(url)
    if not any(name.startswith("vllm:") for name in metrics.samples):
        raise InputError(
            f"the server at {url} has no metrics of vLLM's: it is not vLLM, or was started with "
            f"--disable-log-stats."
        )
    if "vllm_dllm:forwards_total" not in metrics.samples:
        raise InputError(
            f"the server at {url} counts no canvases: it serves no diffusion model, or was started "
            f"without vllm-dllm."
        )
    return metrics


@functools.cache
def _client(scheme: str) -> httpx.Client:
    """Returns this process's HTTP client for URLs of a scheme, made once because that takes 50 ms.
    Of the environment it reads certificates to trust (`SSL_CERT_FILE`), which http does not need,
    but no proxies. It keeps no connection open, because the server may restart. Raises InputError
    for certificates that cannot be read."""
    try:
        verify = False if scheme == "http" else httpx.create_ssl_context(trust_env=True)
    except OSError as error:
        raise InputError(
            f"SSL_CERT_FILE and SSL_CERT_DIR must name certificates that can be read, got "
            f"'{error}'. Correct them or leave them out."
        ) from error
    return httpx.Client(
        trust_env=False, verify=verify, limits=httpx.Limits(max_keepalive_connections=0)
    )


SERVER_OPTIONS = ("--worker-extension-cls", f"{__name__}.WeightSizes")
"""Options of `vllm serve` that `read_weight_bytes` needs."""
SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Environment that `read_weight_bytes` needs. Enables /collective_rpc; only we use the server."""
ANSWER_SECONDS = 600.0  # that a server of our own has to answer


@dataclass(frozen=True)
class Counters:
    """Counts what a server has done between two scrapes."""

    tokens: int  # generated
    forwards: int  # of canvases: denoise steps and commits
    steps_per_block: float | None  # denoise steps per canvas; None: the model has no canvases

    @classmethod
    def since(cls, before: Scrape, port: int) -> "Counters":
        """Returns the counts since the scrape `before` of the server at `port`. Scrapes the server
        again. Raises InputError if it does not answer."""
        change = Change(before, read_metrics(port))

        def total(name: str) -> int:
            return int(change.difference(f"vllm:{name}_total"))

        return cls(
            tokens=total("generation_tokens"),
            forwards=total("diffusion_num_denoising_steps"),
            steps_per_block=change.mean("vllm_dllm:block_denoise_steps"),
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
        answer = _client(url.partition(":")[0]).post(url, json=body, timeout=ANSWER_SECONDS)
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
