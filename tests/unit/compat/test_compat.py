"""All of vLLM that this project hangs on is where it was, and a copy without it is found out.
Requests in flight when a server is told to stop, and which tokens end reasoning, as vLLM's parsers
have it.

A failure of the first test means that vLLM moved something: read the new source, then change
`compat/`."""

import ast
import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from transformers import AutoTokenizer
from vllm.config import StructuredOutputsConfig

from scripts.check_vllm import check_sources
from scripts.seams import SEAMS
from scripts.vllm_seams import (
    Sources,
    changed_kernels,
    changed_overrides,
    changed_signatures,
    missing_imports,
    moved_seams,
)
from tests.patched import patched
from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import CALL, CHANNEL_BEGINS, CHANNEL_ENDS, THOUGHT_ENDS, add_tokens
from vllm_dllm.compat import ending, version
from vllm_dllm.compat.parsers import find_reasoning_ends, make_reasoning_parser
from vllm_dllm.cpu.compat import runner

VLLM = Path(vllm.__file__).parent


def test_version() -> None:
    assert version.is_known(), version.describe_unknown_vllm()


@pytest.mark.slow
def test_the_installed_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = check_sources(VLLM), capsys.readouterr().out
    assert (found, said) == (0, f"vLLM {Sources(VLLM).version}: nothing to look at.\n")


def test_seams_begin_and_end_with_a_known_version() -> None:
    versions = {seam.since for seam in SEAMS} | {seam.until for seam in SEAMS if seam.until}
    assert versions <= {"0", *version.KNOWN}


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
    fly = {"fly_window_size": window, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3}
    answer = verify("logits", None, use_fp64=True, **fly)
    assert answer == (("logits", True) if window == 0 else {"use_fp64": True, **fly})


class Processor:
    """vLLM's, as far as its requests are asked for."""

    def __init__(self, names: list[str]) -> None:
        self.request_states = dict.fromkeys(names)
        self.errors: list[Exception] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def propagate_error(self, error: Exception) -> None:
        self.errors += [error] * len(self.request_states)


@pytest.mark.parametrize("finish", [True, False], ids=["finish", "take too long"])
@pytest.mark.parametrize("shares_engine", [False, True], ids=["one server", "several"])
def test_requests_in_flight(
    finish: bool, shares_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(ending, "_kill_after", limits.append)
    processor, aborted = Processor(["a", "b"]), []

    async def serve() -> None:
        async def abort(names: list[str], internal: bool) -> None:
            aborted.extend(names)

        parallel = SimpleNamespace(_api_process_count=2 if shares_engine else 1)
        engine: Any = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=parallel),
            # Also of one server whose engines are all on other machines.
            engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=None)),
            output_processor=processor,
            output_handler=asyncio.current_task(),
            errored=False,
            abort=abort,
        )
        if finish:
            threading.Timer(0.1, processor.request_states.clear).start()
        limit = 600.0 if finish else (4.2 if shares_engine else 0.2)
        await asyncio.to_thread(ending._stop_requests, engine, limit)
        own_time = limit - (4 if shares_engine else 0)
        assert limits == [pytest.approx(own_time + ending.ALL_S)]

    asyncio.run(serve())
    assert aborted == ([] if finish else ["a", "b"])
    assert len(processor.errors) == len(aborted)
    for error in processor.errors:
        assert isinstance(error, ending.ServerStopping)
        assert error.http_status == error.status_code == 503


def test_a_start_is_not_touched_where_nothing_starts() -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    ending.limit_interrupted_start()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "diffusiongemma-tiny" / name, folder)
    return AutoTokenizer.from_pretrained(add_tokens(Path(folder)))


ENDS = {
    "gemma4": (
        frozenset({CHANNEL_ENDS, CALL}),
        frozenset({CALL}),
        frozenset({CHANNEL_BEGINS}),
        True,
    ),
    "deepseek_r1": (frozenset({THOUGHT_ENDS}), frozenset(), frozenset(), True),
    "deepseek_v3": None,  # unless the request asks it to think
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(tokenizer: Any, name: str) -> None:
    parser = make_reasoning_parser(StructuredOutputsConfig(reasoning_parser=name), tokenizer)
    assert parser is not None and find_reasoning_ends(parser) == ENDS[name]


def test_a_request_can_ask_to_think(tokenizer: Any) -> None:
    config = StructuredOutputsConfig(reasoning_parser="deepseek_v3")
    parser = make_reasoning_parser(config, tokenizer, {"chat_template_kwargs": {"thinking": True}})
    assert parser is not None and find_reasoning_ends(parser) == ENDS["deepseek_r1"]


def test_none() -> None:
    assert make_reasoning_parser(StructuredOutputsConfig(), None) is None
    everywhere = StructuredOutputsConfig(reasoning_parser="gemma4", enable_in_reasoning=True)
    assert make_reasoning_parser(everywhere, None) is None
