from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_build import summary
from tests.cuda_build.machine import Capability
from tests.cuda_build.process import Chip

LINES: list[summary.Line] = []


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda_build")


@pytest.fixture(scope="session")
def chips() -> Iterator[dict[Capability, Chip]]:
    started: dict[Capability, Chip] = {}
    yield started
    for chip in started.values():
        chip.close()


@pytest.fixture
def on_chip(
    chips: dict[Capability, Chip], folder: Path, request: pytest.FixtureRequest
) -> Callable[..., Any]:
    """Runs a function in a process that seems to have such a GPU."""

    def run(capability: Capability, chore: Callable[..., Any], **arguments: Any) -> Any:
        if capability not in chips:
            chips[capability] = Chip(capability, folder)
        result = chips[capability].run(chore, **arguments)
        if reports := summary.reports_of(result):
            name = "sm_{}{}".format(*capability)
            LINES.append(summary.Line(request.node.name, name, reports))
        return result

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if LINES:
        terminalreporter.section("What the dry run covered")
        terminalreporter.write_line(summary.table(LINES))
        terminalreporter.write_line("")
        terminalreporter.write_line(summary.CANNOT)
