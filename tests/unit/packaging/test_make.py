"""What `make` says before it does anything, and what its server logs."""

import shutil
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.processes import run


def test_a_folder_that_is_not_there_ends_serve_before_set_up(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    make = ("make", "-C", tmp_path, "--dry-run")
    (tmp_path / "checkpoints").mkdir()
    for name in ("nope", "checkpoints/nope"):
        refused = run(*make, "serve", f"CHECKPOINT={name}")
        assert refused.returncode == 2 and f"There is no folder '{name}'" in refused.stderr
        assert "pip" not in refused.stdout
    for words in (("serve", "CHECKPOINT=owner/name"), ("lint", "CHECKPOINT=nope")):
        assert "There is no folder" not in run(*make, *words).stderr


def test_a_quiet_server_says_when_it_is_ready() -> None:
    """In the line that README names, which is uvicorn's. vLLM hands it the file, too."""
    config = f"json.load(open({str(ROOT / 'scripts/quiet_log.json')!r}))"
    said = "logging.getLogger('uvicorn.error').info('Application startup complete.')"
    lines = ("import json, logging, logging.config", f"logging.config.dictConfig({config})", said)
    assert "Application startup complete." in run(sys.executable, "-c", "; ".join(lines)).stdout
