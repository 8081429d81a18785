"""All of vLLM that this project hangs on is where it was, and a copy without it is found out.

A failure of the first test means that vLLM moved something: read the new source, then change
`compat/`.
"""

import ast
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import vllm

from scripts.seams import SEAMS
from scripts.vllm_seams import (
    CHECKS,
    Sources,
    changed_kernels,
    changed_overrides,
    changed_signatures,
    missing_imports,
    moved_seams,
)
from tests.patched import patched
from vllm_dllm.compat import version
from vllm_dllm.cpu.compat import runner

VLLM = Path(vllm.__file__).parent


def test_version() -> None:
    assert version.is_known(), version.describe_unknown_vllm()


@pytest.mark.slow
@pytest.mark.parametrize("looks_for", CHECKS, ids=lambda check: check.__name__)
def test_the_installed_vllm(looks_for: Callable[[Sources], Iterator[str]]) -> None:
    assert list(looks_for(Sources(VLLM))) == []


def test_each_seam_says_when_it_holds() -> None:
    """One that vLLM gave up has a successor under the same name, or another that says so."""
    for release in version.KNOWN:
        assert any(version.is_at_least(seam.since, release) for seam in SEAMS)
    starts = {seam.since for seam in SEAMS} | {seam.until for seam in SEAMS if seam.until}
    assert starts <= {"0", *version.KNOWN}


class Altered(Sources):
    """The installed vLLM with some text in one of its modules replaced."""

    def __init__(self, module: str, old: str, new: str) -> None:
        super().__init__(VLLM)
        found = self.module(module)
        assert found is not None and old in found[0]
        text = found[0].replace(old, new)
        self._modules[module] = text, ast.parse(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("looks_for", "altered", "complaint"),
    [
        (
            missing_imports,
            ("v1.outputs", "class DraftTokenIds", "class Drafts"),
            "vllm_dllm/compat/drafting.py imports DraftTokenIds from vllm.v1.outputs",
        ),
        (
            moved_seams,
            ("v1.core.sched.scheduler", "self._update_after_schedule(", "self._after_schedule("),
            "the scheduler counts a step after building it",
        ),
        (
            moved_seams,
            ("v1.worker.gpu.states", "def apply_staged_writes", "def apply_writes"),
            "vllm.v1.worker.gpu.states:RequestState.apply_staged_writes is gone",
        ),
        (
            changed_signatures,
            ("v1.engine.core", "def post_step(self, ", "def post_step(self, outputs, "),
            "EngineCore.post_step takes ['self', 'outputs', 'model_executed']",
        ),
        (
            changed_kernels,
            ("v1.worker.gpu.input_batch", "    total_len_ptr,", "    total_len_ptr, more_ptr,"),
            "kernel vllm.v1.worker.gpu.input_batch._post_update_kernel takes",
        ),
        (
            changed_overrides,
            (
                "v1.worker.gpu_worker",
                'scheduler_output: "SchedulerOutput"\n',
                'scheduler_output: "SchedulerOutput", again: bool\n',
            ),
            "CanvasWorker.execute_model does not take ['again']",
        ),
        (
            changed_overrides,
            ("v1.core.sched.scheduler", "def _free_request(", "def _drop_request("),
            "DraftSchedulerHooks._free_request overrides a method of vLLM that is gone",
        ),
    ],
)
def test_what_moves_is_found(
    looks_for: Callable[[Sources], Iterator[str]], altered: tuple[str, str, str], complaint: str
) -> None:
    assert complaint in "\n".join(looks_for(Altered(*altered)))


def test_runner_calls_only_these_functions_of_triton() -> None:
    """`set_triton_jit` fills in what vLLM's stand-in lacks."""
    known = {"jit", "cdiv", "next_power_of_2", "heuristics"}
    spec = find_spec("vllm.v1.worker.gpu")
    assert spec is not None and spec.submodule_search_locations is not None
    used = set()
    for path in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "triton"
            ):
                used.add(node.attr)
    assert used <= known, f"runner v2 calls more of Triton: {used - known}"


@pytest.mark.parametrize("window", [0, 2])
def test_drafts_are_verified_natively_unless_fly_may_accept_them(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 passes the settings of FLY with every call."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with patched("v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample"):
        monkeypatch.setattr(rejection_sampler, "rejection_sample", lambda *args, **kwargs: kwargs)
        runner.replace_rejection_sample(lambda *args: args)
        verify = rejection_sampler.rejection_sample
    fly = {
        "fly_window_size": window,
        "fly_entropy_threshold": 0.3,
        "fly_entropy_top_k": 3,
    }
    answer = verify("logits", None, use_fp64=True, **fly)
    assert answer == (("logits", True) if window == 0 else {"use_fp64": True, **fly})
