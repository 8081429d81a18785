from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import summary
from tests.cuda_build.machine import Host
from tests.cuda_build.process import Importer

LINES: list[summary.Line] = []
HOST_TIMES: list[str] = []


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda_build")


@pytest.fixture(scope="session")
def importers() -> Iterator[list[Importer]]:
    """The one that is running: a second would take another 3 GiB."""
    running: list[Importer] = []
    yield running
    for importer in running:
        importer.close()


@pytest.fixture
def on_host(
    importers: list[Importer], folder: Path, request: pytest.FixtureRequest
) -> Callable[..., Any]:
    """Runs a function in a process of a machine that is not there."""

    def run(host: Host, chore: Callable[..., Any], **arguments: Any) -> Any:
        if not importers or importers[0].host != host:
            for importer in importers:
                importer.close()
            importers[:] = [Importer(host, folder)]
        result = importers[0].run(chore, **arguments)
        if reports := summary.reports_of(result):
            LINES.append(summary.Line(request.node.name, str(host), reports))
        return result

    return run


@pytest.fixture
def host_times() -> list[str]:
    """Lines for the summary."""
    return HOST_TIMES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if LINES:
        terminalreporter.section("What the dry run covered")
        terminalreporter.write_line(summary.table(LINES))
        terminalreporter.write_line("")
        terminalreporter.write_line(summary.CANNOT)
    if HOST_TIMES:
        terminalreporter.section("CPU time of a step, without a device")
        terminalreporter.write_line("\n".join(HOST_TIMES))
