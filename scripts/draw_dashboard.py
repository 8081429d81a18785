"""Draws docs/dashboard.json without Grafana: Prometheus scrapes a running server for a while, and
answers the queries of all panels.

    make serve   # elsewhere, with clients that send requests
    .venv/bin/python scripts/draw_dashboard.py http://127.0.0.1:8000 --prometheus PROGRAM FILE.png

Needs Prometheus (Debian's package `prometheus`) and matplotlib. A query that Prometheus does not
understand is an error. docs/metrics.md shows the picture. Look at it.
"""

import argparse
import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from matplotlib import pyplot

DASHBOARD = Path(__file__).parents[1] / "docs" / "dashboard.json"
STEP_S = 2
VARIABLES = {"$model_name": ".*", "$engine": ".*", "$__rate_interval": f"{8 * STEP_S}s"}
COLUMNS = 24  # of Grafana's grid
HEADING = 0.3  # inches, of a row of panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("server")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--prometheus", default="prometheus")
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    draw_panels(panels, scrape_panels(panels, arguments), arguments.picture)


def scrape_panels(panels: list[Any], arguments: argparse.Namespace) -> dict[int, list[Any]]:
    """Runs Prometheus for a while. Returns its answers to the queries of each panel, by the panel's
    id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    target = urllib.parse.urlsplit(arguments.server).netloc
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(
            f"global: {{scrape_interval: {STEP_S}s}}\n"
            f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        command = [arguments.prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder}"]
        prometheus = subprocess.Popen(
            [*command, f"--web.listen-address={address}", "--log.level=error"]
        )
        try:
            start = time.time()
            time.sleep(arguments.seconds)
            return {
                panel["id"]: [
                    line
                    for target in panel.get("targets", ())
                    for line in query_prometheus(address, target, start, time.time())
                ]
                for panel in panels
            }
        finally:
            prometheus.terminate()
            prometheus.wait()


def query_prometheus(
    address: str, target: Any, start: float, end: float
) -> list[tuple[str, list[Any]]]:
    """Returns the lines of one query: name, and [time, value] pairs."""
    query = target["expr"]
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    asked = {"query": query, "start": start, "end": end, "step": STEP_S}
    url = f"http://{address}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    try:
        with urllib.request.urlopen(url) as answer:
            found = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{query}: {error.read().decode()}") from error
    # A legend names labels of the metric in double braces.
    legend = re.sub(r"\{\{(\w+)\}\}", r"{\1}", target["legendFormat"])
    return [(legend.format(**line["metric"]), line["values"]) for line in found]


def draw_panels(panels: list[Any], lines: dict[int, list[Any]], picture: Path) -> None:
    """Draws each panel where Grafana has it."""
    places = [panel["gridPos"] for panel in panels]
    height = max(place["y"] + place["h"] for place in places)
    figure = pyplot.figure(figsize=(18, 0.36 * height))
    for panel, place in zip(panels, places, strict=True):
        left, top = place["x"] / COLUMNS, 1 - place["y"] / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.6 / height, panel["title"], weight="bold")
            continue
        size = (place["w"] / COLUMNS - 0.04, (place["h"] - 2.6) / height)
        axes = figure.add_axes((left + 0.03, top - (place["h"] - 1.2) / height, *size))
        axes.set_title(panel["title"], fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        for name, values in lines[panel["id"]]:
            start = values[0][0]
            axes.plot(
                [at - start for at, _ in values], [float(v) for _, v in values], label=name, lw=1.2
            )
        if lines[panel["id"]]:
            axes.legend(fontsize=7, frameon=False)
        else:
            axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, fontsize=8)
        if panel["fieldConfig"]["defaults"].get("min") == 0:
            axes.set_ylim(bottom=0)
    figure.savefig(picture, dpi=70)


if __name__ == "__main__":
    main()
