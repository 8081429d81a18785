"""vLLM's whole engine in one process: it starts as `vllm serve` starts it, and requests go through
its own admission, scheduler, worker and runner. What the device would have sampled is scripted."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cuda_build import compiled, foreign, loading, replays
from tests.cuda_build.device import GpuDevice
from tests.cuda_build.graphs import CUDAGraph

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.warmup",
    "vllm.model_executor.layers.fused_moe.router.gate_linear",
    "transformers",
)
TOKENS_OF_GRAMMARS = "vllm_dllm/step/asked/answer.py"
GRAMMARS = ("vllm_dllm/step/asked/grammars.py", TOKENS_OF_GRAMMARS)
"""Where the host reads what the device found for a grammar."""
PAUSE = 3
"""Each canvas is finished at the step with this number."""


def import_everything(device: GpuDevice) -> None:
    for module in MODULES:
        __import__(module)
    loading.make_up_nothing()
    foreign.replace(device)
    compiled.correct()


@dataclass
class Report:
    """Of an engine: what its host waited for in steps, what a graph must not do, what ran."""

    waits: list[str]
    copies: int
    forbidden: list[str]
    kernels: dict[str, int]
    uncomputed: dict[str, int]
    compiled_late: list[str]  # kernels that requests waited for
    graphs: int
    replays: int
    tokens: dict[str, int]
    facts: dict[str, Any] = field(default_factory=dict)


class Script:
    """What comes back from the device: each canvas is finished after `PAUSE` steps, each
    verification accepts what `accepts` says, all tokens are `token`."""

    def __init__(self, token: int = 300, accepts: int = 2) -> None:
        self.token, self.accepts = token, accepts
        self._steps: Counter[str] = Counter()
        self._batch: Any = None

    def install(self, runner: Any) -> None:
        from vllm.v1.worker.gpu import model_runner
        from vllm.v1.worker.gpu.async_utils import AsyncOutput

        script, sample = self, runner.sample
        is_diffusion = runner.vllm_config.model_config.is_diffusion

        def noting(hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
            script._batch = batch
            return sample(hidden_states, batch, grammar_output)

        class Scripted(AsyncOutput):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                for row, name in enumerate(self.model_runner_output.req_ids):
                    count = script.count(row, name, is_diffusion)
                    self.num_sampled_tokens_np[row] = min(count, self.sampled_token_ids.shape[1])
                    self.sampled_token_ids[row] = script.token

        runner.sample = noting
        model_runner.AsyncOutput = Scripted

    def count(self, row: int, name: str, is_diffusion: bool) -> int:
        batch = self._batch
        drafts = batch.num_draft_tokens_per_req
        width = 0 if drafts is None else int(drafts[row])
        if not is_diffusion:
            is_read = _completes(batch, row) or not batch.is_prefilling_np[row]
            return 1 + min(width, self.accepts) if is_read else 0
        if not width:
            return 0
        self._steps[name] += 1
        return width if self._steps[name] % (PAUSE + 1) == PAUSE else 0


def _completes(batch: Any, row: int) -> bool:
    computed = batch.num_computed_tokens_np[row] + batch.num_scheduled_tokens[row]
    return bool(computed >= batch.prefill_len_np[row])


class Engine:
    def __init__(
        self,
        device: GpuDevice,
        checkpoint: Path,
        *,
        compares_replays: bool = True,  # with the forward that was captured, which takes long
        **options: Any,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        self.device = device
        chosen = {
            "model": str(checkpoint),
            "load_format": "dummy",
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 4096,
            **options,
        }
        if chosen.get("tensor_parallel_size", 1) > 1:
            from tests.cuda_build.ranks import FirstOfSeveral

            chosen["distributed_executor_backend"] = FirstOfSeveral
        with device:
            self.llm = LLMEngine.from_engine_args(
                EngineArgs(**chosen), usage_context=UsageContext.OPENAI_API_SERVER
            )
        self.config = self.llm.vllm_config
        core = self.llm.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        if compares_replays:
            replays.compare(device, self.runner)
        self.script = Script()
        device.answers[TOKENS_OF_GRAMMARS] = self.script.token
        self.script.install(self.runner)
        self.at_start = list(device.waits)
        for log in (device.waits, device.copies, device.launches, device.compiled):
            log.clear()
        self.tokens: Counter[str] = Counter()
        self.adapters: dict[Path | None, Any] = {}

    def load(self, adapters: list[Path]) -> None:
        """The host waits for vLLM's copies of their weights, and in each step for which adapters
        are in it. These waits are left out."""
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
        from vllm.lora.request import LoRARequest

        device, prepare = self.device, LoRAKernelMeta.prepare_tensors

        def prepare_alone(self: Any, adapter_of_token: Any) -> None:
            before = len(device.waits)
            prepare(self, adapter_of_token)
            del device.waits[before:]

        LoRAKernelMeta.prepare_tensors = prepare_alone
        with device:
            for number, path in enumerate(adapters, 1):
                self.adapters[path] = LoRARequest(path.name, number, str(path))
                assert self.llm.add_lora(self.adapters[path])
        for log in (device.waits, device.copies, device.launches):
            log.clear()

    def ask(self, name: str, prompt: Any, **params: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        if regex := params.pop("regex", None):
            params["structured_outputs"] = StructuredOutputsParams(regex=regex)
        adapter = self.adapters.get(params.pop("adapter", None))
        extra = {key: params.pop(key) for key in list(params) if key.startswith("diffusion_")}
        given = SamplingParams(**{"max_tokens": 40, **params}, extra_args=extra or None)
        with self.device:
            self.llm.add_request(name, prompt, given, lora_request=adapter)

    def step(self) -> None:
        with self.device:
            for output in self.llm.step():
                self.tokens[output.request_id] = len(output.outputs[0].token_ids)

    def run(self, most: int = 60) -> None:
        for _ in range(most):
            if not self.llm.has_unfinished_requests():
                return
            self.step()
        names = list(self.llm.output_processor.request_states)
        with self.device:
            self.llm.abort_request(names, internal=True)
        for _ in range(3):
            self.step()

    def report(self, **facts: Any) -> Report:
        device = self.device
        return Report(
            waits=[wait for wait in device.waits if "async_utils.py" not in wait],
            copies=len(device.copies),
            forbidden=list(device.forbidden),
            kernels=dict(device.kernels),
            uncomputed=dict(device.uncomputed),
            compiled_late=sorted(set(device.compiled)),
            graphs=len(CUDAGraph.captured),
            replays=sum(graph.num_replays for graph in CUDAGraph.captured),
            tokens=dict(self.tokens),
            facts=facts,
        )
