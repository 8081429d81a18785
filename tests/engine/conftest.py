"""Offline engines and reference models, one a session for each checkpoint and setting."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import KVTransferConfig
from vllm.config.kv_transfer import KVRole

from checkpoints.recipes.exact_match import read_rows
from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.engines import asynchronous_scheduling, forked_workers, in_this_process
from tests.paths import CHECKPOINTS

TRAINED = CHECKPOINTS / "diffusiongemma-tiny"
HELD_OUT = read_rows(CHECKPOINTS / "held_out.jsonl")
GetTiny = Callable[[int], Path]


def chat_tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Of a chat, up to where the model answers."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Random checkpoint with canvas 32 and the given sliding window."""

    @cache
    def get(sliding_window: int, sees: bool = False) -> Path:
        path = tmp_path_factory.mktemp(f"tiny-w{sliding_window}")
        return make_tiny_checkpoint(
            path, sliding_window=sliding_window, canvas_length=32, sees=sees
        )

    return get


@pytest.fixture(scope="session")
def seeing(tiny: Callable[..., Path]) -> GetTiny:
    """The same, which serves images and videos."""
    return partial(tiny, sees=True)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    """A masked family's random checkpoint and what it is compared with, by block length."""
    from tests.engine import masked_requests

    @cache
    def get(family: str, block_length: int) -> masked_requests.Made:
        folder = tmp_path_factory.mktemp("masked")
        return masked_requests.make(folder, family, block_length)

    return get


class Engine:
    """An offline engine, fp32 if nothing else is said, and the file its canvases are traced to."""

    def __init__(
        self, checkpoint: Path, trace: Path, settings: Mapping[str, Any] | None, **options: Any
    ) -> None:
        self.trace = trace
        # The reference denoises whole canvases.
        settings = {"trace_path": str(trace), "fit_canvas": False, **(settings or {})}
        self.llm = LLM(
            str(checkpoint),
            additional_config={"vllm_dllm": settings},
            **{
                "dtype": "float32",
                "max_model_len": 2048,
                "max_num_seqs": 8,
                "kv_cache_memory_bytes": 256 << 20,
                "enforce_eager": True,
                **options,
            },
        )

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:
        """Of the worker, which runs in this process."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def ask(
        self,
        prompts: Sequence[Any],  # each of token ids, or with an `engine_input`, or one
        params: SamplingParams | Sequence[SamplingParams],
        **options: Any,
    ) -> list[RequestOutput]:
        """All in one batch."""
        inputs = [getattr(prompt, "engine_input", prompt) for prompt in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False, **options)

    def steps(self, request_id: str) -> list[dict[str, Any]]:
        """The traced denoising steps of one request, in order."""
        lines = map(json.loads, self.trace.read_text().splitlines())
        # Inside the engine a request's id carries a random suffix.
        return [line for line in lines if line["request_id"].rpartition("-")[0] == request_id]

    def canvases(self, outputs: list[RequestOutput]) -> list[list[list[int]]]:
        """Of each request, what every forward but the first reads: [steps][C]."""
        found: dict[str, list[list[int]]] = {output.request_id: [] for output in outputs}
        for line in map(json.loads, self.trace.read_text().splitlines()):
            own = found.get(line["request_id"].rpartition("-")[0])
            if own is not None:
                own.append(line["canvas"])
        return list(found.values())


GetEngine = Callable[..., Engine]


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def cached_tokens(engine: Engine, prompt: Any) -> int:  # as `Engine.ask` takes it
    params = SamplingParams(
        max_tokens=1, extra_args={"diffusion_max_steps": 1, "diffusion_read_only": True}
    )
    return engine.ask([prompt], params)[0].num_cached_tokens


def preemptions(engine: Engine) -> float:
    return sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetEngine]:
    """Starts engines of the given checkpoint and options; one at a time, the last one is kept."""
    running: dict[str, Engine] = {}
    process = ExitStack()

    def start(
        checkpoint: Path, settings: Mapping[str, Any] | None = None, **options: Any
    ) -> Engine:
        """`settings` of the extension, `options` of vLLM."""
        key = f"{checkpoint} {settings} {sorted(options.items())}"
        if key not in running:
            stop()
            process.enter_context(in_this_process())
            trace = tmp_path_factory.mktemp("trace") / "canvases.jsonl"
            running[key] = Engine(checkpoint, trace, settings, **options)
        return running[key]

    def stop() -> None:
        for engine in running.values():
            engine.llm.llm_engine.engine_core.shutdown()
            del engine.llm
        running.clear()
        process.close()

    yield start
    stop()


def connector(folder: Path, role: KVRole = "kv_both") -> dict[str, Any]:
    """The option of an engine that reads and writes prompts in `folder`."""
    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )
    return {"kv_transfer_config": config}


@pytest.fixture
def asynchronous() -> Iterator[None]:
    with asynchronous_scheduling():
        yield


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def is_ahead(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether engines of this test, started with `async_scheduling`, do so: both are tried."""
    with asynchronous_scheduling() if request.param else nullcontext():
        yield request.param


@pytest.fixture
def two_processes() -> Iterator[dict[str, int]]:
    """Options of an engine of two workers."""
    with forked_workers():
        yield {"tensor_parallel_size": 2}
