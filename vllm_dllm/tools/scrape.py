"""The numbers on a server's `/metrics`, and how they have changed."""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_dllm.errors import InputError

TIMEOUT_SECONDS = 5.0
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Scrape:
    at: float  # seconds of the monotonic clock
    samples: Mapping[str, list[tuple[Labels, float]]]  # by name

    def total(self, name: str, **labels: str) -> float:
        """Adds up the samples of all engines that have these labels; 0 if there are none."""
        return sum(
            value for found, value in self.samples.get(name, ()) if labels.items() <= found.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Adds up by the values of a label, in the server's order."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            found[labels[label]] = found.get(labels[label], 0.0) + value
        return found

    def is_behind(self, earlier: "Scrape") -> bool:
        """Says whether the server was started anew since then."""
        name = "vllm_dllm:forwards_total"
        return self.total(name) < earlier.total(name)


@dataclass(frozen=True)
class Change:
    """What has happened since the scrape `before`, or if it is None, since the server's start."""

    before: Scrape | None
    now: Scrape

    def difference(self, name: str, **labels: str) -> float:
        before = self.before.total(name, **labels) if self.before is not None else 0.0
        return self.now.total(name, **labels) - before

    def ratio(self, name: str, per: str) -> float | None:
        """Divides two changes; None if there is nothing to divide by."""
        whole = self.difference(per)
        return self.difference(name) / whole if whole else None

    def mean(self, histogram: str) -> float | None:
        return self.ratio(f"{histogram}_sum", f"{histogram}_count")

    def rate(self, name: str) -> float | None:
        """Gives the change per second."""
        if self.before is None or self.now.at <= self.before.at:
            return None
        return self.difference(name) / (self.now.at - self.before.at)

    def shares(self, name: str, label: str) -> dict[str, float]:
        found = {
            value: self.difference(name, **{label: value}) for value in self.now.by(name, label)
        }
        whole = sum(found.values())
        return {value: part / whole for value, part in found.items() if part} if whole else {}


def scrape(url: str, timeout_s: float = TIMEOUT_SECONDS) -> Scrape:
    """Reads a server's metrics. Raises InputError if none at `url` answers with them in time."""
    text = _get(url, timeout_s)
    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise InputError(f"{url}/metrics is not a list of metrics ({error}).") from error
    return Scrape(time.monotonic(), samples)


def scrape_canvases(url: str) -> Scrape:
    """Reads a diffusion server's metrics. Raises InputError if there is none at `url`."""
    found = scrape(url)
    samples = found.samples
    if not any(name.startswith("vllm:") for name in samples):
        raise InputError(
            f"the server at {url} has no metrics of vLLM's: it is not vLLM, or was started with "
            f"--disable-log-stats."
        )
    if "vllm_dllm:forwards_total" not in samples:
        raise InputError(
            f"the server at {url} counts no canvases: it serves no diffusion model, or was started "
            f"without vllm-dllm."
        )
    return found


@functools.cache
def _client() -> httpx.Client:
    """Makes one client for all scrapes, because making one takes 50 ms. It ignores proxies that the
    environment names, and keeps no connection open because the server may start anew."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def _get(url: str, timeout_s: float) -> str:
    try:
        answer = _client().get(f"{url}/metrics", timeout=timeout_s)
        return answer.raise_for_status().text
    except httpx.UnsupportedProtocol as error:
        raise InputError(f"--url must be like http://127.0.0.1:8000, got '{url}'.") from error
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise InputError(
            f"the server at {url} answers /metrics with HTTP {status}: it is not vLLM."
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(
            f"no server answers at {url} ({error}). Start one, or name its address with --url."
        ) from error
