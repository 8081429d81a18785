"""What `make` says before it does anything."""

import shutil
from pathlib import Path

from tests.paths import ROOT
from tests.processes import run


def test_a_folder_that_is_not_there_ends_serve_before_set_up(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    make = ("make", "-C", tmp_path, "--dry-run")
    refused = run(*make, "serve", "CHECKPOINT=nope")
    assert refused.returncode == 2 and "There is no folder 'nope'" in refused.stderr
    assert "pip" not in refused.stdout
    for words in (("serve", "CHECKPOINT=owner/name"), ("lint", "CHECKPOINT=nope")):
        assert "There is no folder" not in run(*make, *words).stderr
