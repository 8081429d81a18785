"""The tests that `make test` tries of engines and servers are there."""

import re

import pytest

from tests.features import TRIED
from tests.paths import ROOT


@pytest.mark.parametrize("name", TRIED)
def test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    source = (ROOT / file).read_text()
    assert not function or re.search(rf"^def {function.partition('[')[0]}\(", source, re.MULTILINE)
