"""What is left of a model's weights where new ones cannot be loaded."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch import nn

from vllm_dllm.compat.reloading import WeightsLost, reload


@pytest.fixture
def config() -> Any:
    return SimpleNamespace(model="old", model_weights="", revision=None)


def test_the_old_weights_come_back(config: Any) -> None:
    loaded = []

    def fails() -> NoReturn:
        config.model = "new"
        raise KeyError("no weights for norm.weight")

    with pytest.raises(ValueError, match=r"no weights for norm.*has those of old again"):
        reload(config, nn.Linear(1, 1), fails, lambda: loaded.append(config.model))
    assert loaded == ["old"]


def test_nor_do_the_old_weights_load(config: Any) -> None:
    """Both reasons are named: neither is enough to mend it."""

    def fails() -> NoReturn:
        config.model = "new"
        raise KeyError("no weights for norm.weight")

    def is_gone() -> NoReturn:
        raise FileNotFoundError(config.model)

    with pytest.raises(WeightsLost, match=r"norm\.weight.*of old again \(old\)") as lost:
        reload(config, nn.Linear(1, 1), fails, is_gone)
    assert isinstance(lost.value.__cause__, KeyError)
