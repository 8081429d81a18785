"""Every private name of vLLM that `compat/` takes hold of is where it was, and is still used.

A failure here means that vLLM moved something: read the new source, then change `compat/`.
"""

import ast
import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import vllm
from vllm.utils.diffusion import validate_diffusion_sampling_params

from vllm_dllm.compat import version
from vllm_dllm.compat.log_lines import ENGINE_FAILED, FAILED_START, NO_TRITON
from vllm_dllm.compat.runner import PROMPT_ROWS
from vllm_dllm.cpu.kernels import NATIVE_KERNELS
from vllm_dllm.cpu.launch import CpuKernel
from vllm_dllm.requests.options import check_request

VLLM = Path(vllm.__file__).parent


def source(module: str) -> str:
    return (VLLM / f"{module.replace('.', '/')}.py").read_text()


def body_of(module: str, *names: str) -> str:
    """The source of a function or class, looked up in the file: loaded ones may be patched."""
    text = source(module)
    nodes = ast.parse(text).body
    for name in names:
        node = next((n for n in nodes if getattr(n, "name", None) == name), None)
        assert node is not None, f"vllm/{module} has no {'.'.join(names)}"
        nodes = getattr(node, "body", [])
    return ast.get_source_segment(text, node)


def test_version() -> None:
    assert version.is_supported(), version.complaint()


# What we replace or call, and a line of the place in vLLM that makes it matter.
SEAMS = {
    "the CPU kernel that writes keys and values": (
        ("_custom_ops", "cpu_attn_reshape_and_cache"),
        "torch.ops._C.cpu_attn_reshape_and_cache(",
    ),
    "the C++ RMS norm": (("_custom_ops", "rms_norm"), "torch.ops._C.rms_norm(out, input,"),
    "the cached choice of attention backend": (
        ("v1.attention.selector", "get_attn_backend"),
        "_cached_get_attn_backend(",
    ),
    "the cache can be cleared": (
        ("v1.attention.selector",),
        "@cache\ndef _cached_get_attn_backend",
    ),
    "extensions have one backend name that every process knows": (
        ("v1.attention.backends.registry", "AttentionBackendEnum"),
        "CUSTOM = None",
    ),
    "the GPU platform asks the chosen backend's class": (
        ("platforms.cuda", "_get_attn_backend_class"),
        ".get_class()",
    ),
    "the CPU platform names its backend by the registry": (
        ("platforms.cpu", "CpuPlatform", "get_attn_backend_cls"),
        "return AttentionBackendEnum.CPU_ATTN.get_path()",
    ),
    "the admission check of diffusion requests": (
        ("v1.engine.input_processor", "InputProcessor"),
        "validate_diffusion_sampling_params(",
    ),
    "all of a request's parameters are checked at once": (
        ("v1.engine.input_processor", "InputProcessor", "process_inputs"),
        "watermarking = self._validate_params(params, supported_tasks)",
    ),
    "stop tokens and bad words are known after the check": (
        ("v1.engine.input_processor", "InputProcessor", "process_inputs"),
        """sampling_params.update_from_generation_config(
                self.generation_config_fields,
                self.renderer.get_eos_token_id(),
            )
            if self.tokenizer is not None:
                sampling_params.update_from_tokenizer(self.tokenizer)""",
    ),
    "chats are rendered by the method we replace": (
        ("entrypoints.openai.chat_completion.serving",),
        "return await self.online_renderer.render_chat(request)",
    ),
    "completions, too": (
        ("entrypoints.openai.completion.serving",),
        "self.online_renderer.render_completion(request)",
    ),
    "and responses": (
        ("entrypoints.openai.responses.serving",),
        "self.online_renderer.render_responses(",
    ),
    "a tool parser is known by its class": (
        ("renderers.online_renderer", "OnlineRenderer", "render_chat"),
        "tool_parser = self.parser.tool_parser_cls if self.parser is not None else None",
    ),
    "beam search begins with its parameters": (
        ("entrypoints.generate.beam_search.offline", "BeamSearchOfflineMixin", "beam_search"),
        "self.llm_engine.input_processor.resolve_watermarking(params)",
    ),
    "the check of diffusion sampling parameters": (
        ("sampling_params", "SamplingParams", "verify"),
        "self._validate_diffusion(model_config)",
    ),
    "configurations by architecture": (
        ("config.vllm", "VllmConfig", "try_verify_and_update_config"),
        "MODELS_CONFIG_MAP.get(architecture, None)",
    ),
    "vLLM names its diffusion schedulers where nobody has named one": (
        ("config.vllm", "VllmConfig", "__post_init__"),
        "and self.scheduler_config.scheduler_cls is None",
    ),
    "the engine calls what is named": (
        ("v1.engine.core", "EngineCore", "__init__"),
        "self.scheduler: SchedulerInterface = Scheduler(\n            vllm_config=vllm_config,",
    ),
    "a scheduler that runs ahead leaves drafts alone that are narrow enough": (
        ("v1.core.sched.diffusion_scheduler", "DiffusionAsyncScheduler", "schedule"),
        """width = diffusion_canvas_width(request, self.num_spec_tokens)
            # The placeholders are as wide as the served canvas.
            if len(request.spec_token_ids) > width:""",
    ),
    "the GPU platform keeps a worker that was named before": (
        ("platforms.cuda", "CudaPlatformBase", "check_and_update_config"),
        'if parallel_config.worker_cls == "auto":',
    ),
    "the worker runs a step": (
        ("v1.worker.gpu_worker", "Worker", "execute_model"),
        "output = self.model_runner.execute_model(",
    ),
    "the scheduler counts a step after building it": (
        ("v1.core.sched.scheduler", "Scheduler", "schedule"),
        "self._update_after_schedule(scheduler_output)",
    ),
    "the scheduler takes a request's tokens": (
        ("v1.core.sched.scheduler", "Scheduler", "update_from_output"),
        "new_token_ids, stopped = self._update_request_with_output(",
    ),
    "the cache blocks to be zeroed": (
        ("v1.core.sched.scheduler", "Scheduler", "schedule"),
        "new_block_ids_to_zero=self._get_new_block_ids_to_zero(),",
    ),
    "after a step the engine only asks for draft tokens": (
        ("v1.engine.core", "EngineCore", "post_step"),
        """if self.check_for_draft_tokens and not self.async_scheduling and model_executed:
            draft_token_ids = self.model_executor.take_draft_token_ids()
            if draft_token_ids is not None:
                self.scheduler.update_draft_token_ids(draft_token_ids)""",
    ),
    "the runner counts what is prefilled of the requests that it knows": (
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "update_requests"),
        """np.minimum(
            self.req_states.num_computed_tokens_np,
            self.req_states.prefill_len.np,""",
    ),
    "a prefill lasts to prefill_len": (
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "gather_batch_req_state"),
        "is_prefilling_np = num_computed_prefill_tokens_np < prefill_len_np",
    ),
    "prefill_len is what kernels read after a copy": (
        ("v1.worker.gpu.states", "RequestState", "apply_staged_writes"),
        "self.prefill_len.copy_to_uva()",
    ),
    "the scheduler says how many tokens a request has got": (
        ("v1.core.sched.scheduler", "Scheduler", "_make_cached_request_data"),
        "req.num_output_tokens + req.num_output_placeholders",
    ),
    "the engine asks the configuration for its scheduler": (
        ("v1.engine.core", "EngineCore", "__init__"),
        "Scheduler = vllm_config.scheduler_config.get_scheduler_cls()",
    ),
    "the scheduler takes drafts": (
        ("v1.core.sched.scheduler", "Scheduler", "update_draft_token_ids"),
        "request.spec_token_ids = self.structured_output_manager.validate_tokens(",
    ),
    "a scheduler that runs ahead shares one list of drafts": (
        ("v1.core.sched.async_scheduler", "AsyncScheduler", "_update_after_schedule"),
        "request.spec_token_ids = self._spec_token_placeholders",
    ),
    "the scheduler counts verified drafts": (
        ("v1.core.sched.scheduler", "Scheduler", "update_from_output"),
        "spec_decoding_stats = self.make_spec_decoding_stats(",
    ),
    "the scheduler frees a request": (
        ("v1.core.sched.scheduler", "Scheduler", "finish_requests"),
        "self._free_request(request",
    ),
    "the runner makes its speculator": (
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "__init__"),
        "self.speculator = init_speculator(",
    ),
    "the runner knows how many tokens to draft before it drafts": (
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "sample_tokens"),
        "num_spec_tokens = self.execute_model_state.num_spec_tokens_to_schedule",
    ),
    "the speculator stores the context before it drafts": (
        ("v1.worker.gpu.spec_decode.dflash.speculator", "DFlashSpeculator", "propose"),
        "self._precompute_context_kv(0, num_target_tokens, dummy_run)",
    ),
    "a captured draft stores it too": (
        (
            "v1.worker.gpu.spec_decode.dflash.speculator",
            "DFlashSpeculator",
            "_prepare_graph_forward",
        ),
        "self._precompute_context_kv(0, self._num_graph_context_tokens(num_reqs))",
    ),
    "a step has slots for the drafter's cache, too": (
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_attn"),
        "self.block_tables.compute_slot_mappings(",
    ),
    "the sampler of drafts verifies them": (
        ("v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler", "_verify"),
        "sampled, num_sampled = rejection_sample(",
    ),
    "prompts are scored in chunks": (
        ("v1.worker.gpu.sample.prompt_logprob", "compute_prompt_logprobs_with_chunking"),
        """for start_idx in range(0, prompt_token_ids.shape[0], CHUNK_SIZE):
        end_idx = start_idx + CHUNK_SIZE""",
    ),
    "chosen tokens, too": (
        ("v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker"),
        "b = min(a + CHUNK_SIZE, hi)",
    ),
    "a request with one token left is padded with drafts": (
        ("v1.core.sched.scheduler", "Scheduler", "schedule"),
        "padded_num_tokens = 1 + self.num_spec_tokens",
    ),
    "prompts are scored to the end of what is scheduled": (
        ("v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker", "compute_prompt_logprobs"),
        """end_idx = query_start_loc_np[i + 1]
            assert start_idx < end_idx, (
                f"start_idx ({start_idx}) >= end_idx ({end_idx})"
            )
            if not req_is_prompt_chunked:
                end_idx -= 1""",
    ),
    "the runner scores prompts by": (
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "sample_tokens"),
        """self.prompt_logprobs_worker.compute_prompt_logprobs(
            self.model.compute_logits,
            hidden_states,
            input_batch,
            self.req_states.all_token_ids.gpu,
            self.req_states.num_computed_tokens.gpu,
            self.req_states.prompt_len.np,
        )""",
    ),
    "the runner frees a slot": (
        ("v1.worker.gpu.model_runner", "GPUModelRunner", "_remove_request"),
        "req_idx = self.req_states.remove_request(req_id)",
    ),
    "tokens of a request that comes are written to its slot": (
        ("v1.worker.gpu.states", "RequestState", "add_request"),
        "self.all_token_ids.stage_write(req_idx, 0, all_token_ids)",
    ),
    "in chunks of so many rows": (
        ("v1.worker.gpu.sample.prompt_logprob",),
        f"\nCHUNK_SIZE = {PROMPT_ROWS}\n",
    ),
    "a server makes its socket": (
        ("entrypoints.launchers.launcher", "setup_server"),
        "sock = create_server_socket(sock_addr, reuse_port=reuse_port)",
    ),
    "plugins are loaded before a server's arguments are parsed": (
        ("engine.arg_utils", "AsyncEngineArgs", "add_cli_args"),
        "load_general_plugins()",
    ),
    "a server's arguments become an engine's configuration": (
        ("entrypoints.launchers.api_server.entry", "build_async_engine_client_from_engine_args"),
        "vllm_config = engine_args.create_engine_config(",
    ),
    "a worker that cannot start": (
        ("v1.executor.multiproc_executor", "WorkerProc"),
        f'logger.exception("{FAILED_START["vllm.v1.executor.multiproc_executor"]}")',
    ),
    "an engine that cannot start": (
        ("v1.engine.core", "EngineCoreProc", "run_engine_core"),
        f'logger.exception("{FAILED_START["vllm.v1.engine.core"]}")',
    ),
    "its parent knows no reason": (("v1.engine.utils",), ENGINE_FAILED),
    "Triton has no backend for CPUs": (
        ("triton_utils.importing",),
        NO_TRITON["vllm.triton_utils.importing"],
    ),
    "and is taken for absent": (("platforms.cpu",), NO_TRITON["vllm.platforms.cpu"]),
    "a server freezes its objects": (
        ("entrypoints.launchers.utils.server_utils",),
        "freeze_gc_heap()",
    ),
    "plugins of the platform are asked before Transformers is imported": (
        ("config.model",),
        """from vllm.platforms import CpuArchEnum, current_platform
from vllm.tasks import PoolingTask, ScoreType, SupportedTask
from vllm.transformers_utils.config import (""",
    ),
    "the command line asks for the version of `vllm`": (
        ("entrypoints.cli.main", "main"),
        'importlib.metadata.version("vllm")',
    ),
    "the choice of model runner": (
        ("v1.worker.gpu_worker", "Worker", "__init__"),
        "self.use_v2_model_runner = vllm_config.use_v2_model_runner",
    ),
    "the check of the choice": (
        ("config.vllm", "VllmConfig", "__post_init__"),
        "self._validate_v2_model_runner()",
    ),
    "what that check wants": (
        ("config.vllm", "VllmConfig", "_validate_v2_model_runner"),
        "if not HAS_TRITON:",
    ),
    "the worker class is final when the check comes": (
        ("platforms.cpu", "CpuPlatform", "check_and_update_config"),
        'parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"',
    ),
    "the CPU worker makes its runner in init_device": (
        ("v1.worker.cpu_worker", "CPUWorker", "init_device"),
        "if self.use_v2_model_runner:",
    ),
    "a compiled model is loaded, then completed": (
        ("compilation.decorators", "_try_load_aot_compiled_fn"),
        "loaded_fn._artifacts.compiled_fn.finalize_loading(model.vllm_config)",
    ),
    "a compiled model is looked for by a key": (
        ("compilation.decorators", "_support_torch_compile"),
        "factors.append(_model_hash_key(self.forward))",
    ),
    "what cannot be loaded is compiled": (
        ("compilation.decorators", "_support_torch_compile"),
        """loaded_fn = _try_load_aot_compiled_fn(self, aot_compilation_path)
                if loaded_fn is not None:""",
    ),
    "on CPUs Inductor compiles the model in one piece": (
        ("platforms.cpu", "CpuPlatform", "check_and_update_config"),
        "compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE",
    ),
    "the cores of CPU workers": (
        ("utils.ompmultiprocessing", "OMPProcessManager", "_parse_omp_threads_bind_env"),
        """cpu_list, reserve_list = self._get_autobind_cpu_ids(
                    lambda cpus: cpus[-1:]
                )""",
    ),
    "are chosen when the workers are started": (
        ("v1.executor.multiproc_executor", "MultiprocExecutor", "_init_executor"),
        "cpu_omp_manager = OMPProcessManager(self.vllm_config)",
    ),
    "how many are reserved": (
        ("utils.ompmultiprocessing", "OMPProcessManager", "_get_autobind_cpu_ids"),
        "if total_cpu_num <= self.reserve_cpu_num:",
    ),
    "the cores that a quota leaves": (
        ("utils.torch_utils", "available_cpu_count"),
        "limit = _cgroup_cpu_limit()",
    ),
    "the threads of a worker that has loaded its model": (
        ("v1.worker.gpu_worker", "Worker", "load_model"),
        "set_torch_threads_for_runtime()",
    ),
    "a CPU worker's kernels for the cache": (
        ("v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder", "_set_isa_to_layers"),
        "layer.isa = self.isa",
    ),
    "a worker that does not answer": (
        ("distributed.device_communicators.shm_broadcast",),
        "VLLM_RINGBUFFER_WARNING_INTERVAL = envs.VLLM_RINGBUFFER_WARNING_INTERVAL",
    ),
    "the stand-ins for Triton": (("triton_utils",), "triton = TritonPlaceholder()"),
    "the stand-in for its language": (("triton_utils",), "tl = TritonLanguagePlaceholder()"),
    "their constexpr": (
        ("triton_utils.importing", "TritonLanguagePlaceholder", "__init__"),
        "self.constexpr =",
    ),
}


@pytest.mark.parametrize("seam", SEAMS)
def test_vllm_still_uses(seam: str) -> None:
    (module, *names), line = SEAMS[seam]
    if (VLLM / module.replace(".", "/") / "__init__.py").exists():
        module += ".__init__"
    text = body_of(module, *names) if names else source(module)
    assert line in text, f"vllm.{module} {'.'.join(names)} no longer says: {line}"


def parameters(function: Callable) -> list[str]:
    every = inspect.signature(function).parameters.values()
    return [p.name for p in every if p.kind is not p.VAR_KEYWORD]


# Of no use to native code.
BLOCK_SIZES = ("BLOCK_SIZE", "LOOKAHEAD_BLOCK", "TOPK_BLOCK_SIZE", "TRITON_BLOCK_SIZE")


@pytest.mark.parametrize("name", NATIVE_KERNELS)
def test_kernel_still_takes_what_its_native_version_takes(name: str) -> None:
    """`tests/unit/cpu` compares what they do."""
    module_name, kernel_name = name.rsplit(".", 1)
    kernel = getattr(import_module(module_name), kernel_name)
    theirs = parameters(kernel.fn if isinstance(kernel, CpuKernel) else kernel)
    expected = [p.removesuffix("_ptr") for p in theirs if p not in BLOCK_SIZES]
    assert parameters(NATIVE_KERNELS[name]) == ["grid", *expected]


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


def test_our_admission_check_is_called_as_vllms() -> None:
    assert parameters(check_request) == parameters(validate_diffusion_sampling_params)
