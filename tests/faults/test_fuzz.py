"""Thousands of odd requests, with and without a drafter, and with pictures: no HTTP 500, no request
without an answer, no answer that breaks its request, and answers of another client that stay the
same.

`python -m bench.fuzz` sends others, and more.
"""

from pathlib import Path

import pytest

from tests.faults.fuzz import SERVERS, attack

REQUESTS = 1000


@pytest.mark.parametrize("name", SERVERS)
def test_odd_requests(name: str, tmp_path: Path) -> None:
    fuzz = attack(name, REQUESTS, number=1, folder=tmp_path)
    assert fuzz.broken == [], f"{len(fuzz.broken)} of {fuzz.statuses.total()}"
    assert fuzz.statuses[200] > REQUESTS / 4
