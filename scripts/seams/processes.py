"""Seams in how processes start and end, and where a CPU worker computes."""

from scripts.seams.seam import Seam
from vllm_dllm.compat.log_lines import ENGINE_FAILED, FAILED_CALL, FAILED_START, WRONG_CPU_WARNINGS

SEAMS = [
    # --- processes start, and end -----------------------------------------------------------------
    Seam(
        "a server makes its socket",
        "entrypoints.launchers.launcher:setup_server",
        "sock = create_server_socket(sock_addr, reuse_port=reuse_port)",
    ),
    Seam(
        "plugins are loaded before a server's arguments are parsed",
        "engine.arg_utils:AsyncEngineArgs.add_cli_args",
        "load_general_plugins()",
    ),
    Seam(
        "a server's arguments become an engine's configuration",
        "entrypoints.launchers.api_server.entry:build_async_engine_client_from_engine_args",
        "vllm_config = engine_args.create_engine_config(",
    ),
    Seam(
        "a worker that cannot start",
        "v1.executor.multiproc_executor:WorkerProc",
        f'logger.exception("{FAILED_START["vllm.v1.executor.multiproc_executor"]}")',
    ),
    Seam(
        "a worker that cannot do what it is asked",
        "v1.executor.multiproc_executor:WorkerProc",
        f'logger.exception("{FAILED_CALL}")',
    ),
    Seam(
        "an engine that cannot start",
        "v1.engine.core:EngineCoreProc.run_engine_core",
        f'logger.exception("{FAILED_START["vllm.v1.engine.core"]}")',
    ),
    Seam("an engine's parent gives no reason", "v1.engine.utils", ENGINE_FAILED),
    Seam(
        "Triton has no backend for CPUs",
        "triton_utils.importing",
        WRONG_CPU_WARNINGS["vllm.triton_utils.importing"],
    ),
    Seam(
        "Triton without a backend is taken for absent",
        "platforms.cpu",
        WRONG_CPU_WARNINGS["vllm.platforms.cpu"],
    ),
    Seam(
        "a server freezes its objects",
        "entrypoints.launchers.utils.server_utils",
        "freeze_gc_heap()",
    ),
    Seam(
        "plugins of the platform are asked before Transformers is imported",
        "config.model",
        """from vllm.platforms import CpuArchEnum, current_platform
from vllm.tasks import PoolingTask, ScoreType, SupportedTask
from vllm.transformers_utils.config import (""",
    ),
    Seam(
        "the command line asks for the version of `vllm`",
        "entrypoints.cli.main:main",
        'importlib.metadata.version("vllm")',
    ),
    # --- CPUs without Triton ----------------------------------------------------------------------
    Seam(
        "the worker asks the configuration for its model runner",
        "v1.worker.gpu_worker:Worker.__init__",
        "self.use_v2_model_runner = vllm_config.use_v2_model_runner",
    ),
    Seam(
        "the configuration checks its model runner",
        "config.vllm:VllmConfig.__post_init__",
        "self._validate_v2_model_runner()",
    ),
    Seam(
        "the check of model runner v2 wants Triton",
        "config.vllm:VllmConfig._validate_v2_model_runner",
        "if not HAS_TRITON:",
        until="0.33",
    ),
    Seam(
        "the worker of model runner v2 wants Triton",
        "v1.worker.gpu_worker:Worker.__init__",
        "if self.use_v2_model_runner and not HAS_TRITON:",
        since="0.33",
    ),
    Seam(
        "the worker class is final when the check comes",
        "platforms.cpu:CpuPlatform.check_and_update_config",
        'parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"',
    ),
    Seam(
        "the CPU worker makes its runner in init_device",
        "v1.worker.cpu_worker:CPUWorker.init_device",
        "if self.use_v2_model_runner:",
    ),
    Seam(
        "the CPU worker warms kernels up, unless told not to",
        "v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        "if self.use_v2_model_runner and kernel_config.enable_jit_warmup:",
        since="0.33",
    ),
    Seam(
        "ranks are told to exchange by a class that the platform names",
        "distributed.device_communicators.cpu_communicator:CpuCommunicator.all_gather",
        "self.dist_module.all_gather_into_tensor(",
    ),
    Seam("the stand-ins for Triton", "triton_utils", "triton = TritonPlaceholder()"),
    Seam("the stand-in for its language", "triton_utils", "tl = TritonLanguagePlaceholder()"),
    Seam(
        "the stand-in for Triton's language has a constexpr",
        "triton_utils.importing:TritonLanguagePlaceholder.__init__",
        "self.constexpr =",
    ),
    # --- CPU engines from a fork server -----------------------------------------------------------
    Seam(
        "an engine's process starts in a context",
        "v1.engine.utils:CoreEngineProcManager.__init__",
        "context = get_mp_context()",
    ),
    Seam(
        "workers start in a context",
        "v1.executor.multiproc_executor:MultiprocExecutor._init_executor",
        "context = get_mp_context()",
    ),
    Seam(
        "each worker's process starts in a context",
        "v1.executor.multiproc_executor:WorkerProc.make_worker_process",
        "context = get_mp_context()",
    ),
    Seam(
        "a worker's cores are in its environment",
        "utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs",
        'envs_dict["GOMP_CPU_AFFINITY"] = cpu_list_str',
    ),
    Seam(
        "a worker's cores are in its environment without PyTorch's OpenMP library",
        "utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs",
        'envs_dict["OMP_PLACES"] = f"{{{cpu_list_str}}}"',
    ),
    Seam(
        "libraries that CPU engines load first",
        "platforms.cpu:CpuPlatform.check_and_update_config",
        """            torch_libs_paths = [
                os.path.join(site_root, "torch.libs"),
                os.path.join(torch_pkg, "lib"),
            ]""",
    ),
    Seam(
        "the allocator that CPU engines load first",
        "platforms.cpu:CpuPlatform.check_and_update_config",
        'for pattern in ("libtcmalloc_minimal*.so*", "libtcmalloc.so*"):',
    ),
    # --- compiled models on CPUs ------------------------------------------------------------------
    Seam(
        "a compiled model is loaded, then completed",
        "compilation.decorators:_try_load_aot_compiled_fn",
        "loaded_fn._artifacts.compiled_fn.finalize_loading(model.vllm_config)",
    ),
    Seam(
        "a compiled model is looked for by a key that has the additional configuration",
        "config.vllm:VllmConfig.compute_hash",
        "json.dumps(additional_config, sort_keys=True)",
    ),
    Seam(
        "what cannot be loaded is compiled",
        "compilation.decorators:_support_torch_compile",
        """loaded_fn = _try_load_aot_compiled_fn(self, aot_compilation_path)
                if loaded_fn is not None:""",
    ),
    Seam(
        "on CPUs Inductor compiles the model in one piece",
        "platforms.cpu:CpuPlatform.check_and_update_config",
        "compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE",
    ),
    Seam(
        "when a worker that does not answer is said to hang",
        "distributed.device_communicators.shm_broadcast",
        "VLLM_RINGBUFFER_WARNING_INTERVAL = envs.VLLM_RINGBUFFER_WARNING_INTERVAL",
    ),
    Seam(
        "how long a reader stays awake after a message",
        "distributed.device_communicators.shm_broadcast:SpinCondition.wait",
        """if current_time <= self.last_read + self.busy_loop_s:
            sched_yield()""",
    ),
    # --- cores and threads of CPU workers ---------------------------------------------------------
    Seam(
        "vLLM chooses the cores of CPU workers",
        "utils.ompmultiprocessing:OMPProcessManager._parse_omp_threads_bind_env",
        """cpu_list, reserve_list = self._get_autobind_cpu_ids(
                    lambda cpus: cpus[-1:]
                )""",
    ),
    Seam(
        "the cores of CPU workers are chosen when workers are started",
        "v1.executor.multiproc_executor:MultiprocExecutor._init_executor",
        "cpu_omp_manager = OMPProcessManager(self.vllm_config)",
    ),
    Seam(
        "some cores are reserved",
        "utils.ompmultiprocessing:OMPProcessManager._get_autobind_cpu_ids",
        "if total_cpu_num <= self.reserve_cpu_num:",
    ),
    Seam(
        "the cores that a quota leaves",
        "utils.torch_utils:available_cpu_count",
        "limit = _cgroup_cpu_limit()",
    ),
    Seam(
        "what is said of a worker's threads",
        "utils.torch_utils:set_torch_threads_for_runtime",
        f'"{WRONG_CPU_WARNINGS["vllm.utils.torch_utils"]}',
    ),
    # --- how a server ends ----------------------------------------------------------------------
    Seam(
        "a server that is told to stop ends its engine's client, on another thread",
        "entrypoints.launchers.launcher:serve_http",
        "None, partial(engine_client.shutdown, timeout=timeout)",
    ),
    Seam(
        "a server that is told to stop waits for its connections",
        "entrypoints.launchers.launcher:serve_http",
        "return server.shutdown()",
    ),
    Seam(
        "how a start is interrupted",
        "entrypoints.launchers.api_server.entry:run_server",
        "signal.signal(signal.SIGTERM, _interrupt_init)",
    ),
    Seam(
        "requests are admitted one by one",
        "v1.engine.async_llm:AsyncLLM._add_request",
        "self.check_admission(request_id=request.request_id)",
    ),
    Seam(
        "errors with a status of their own reach the client",
        "v1.engine.async_llm:AsyncLLM.generate",
        "except (VLLMClientError, GracefulHTTPError",
    ),
    Seam(
        "an error ends all requests",
        "v1.engine.output_processor:OutputProcessor.propagate_error",
        "state.queue.put(e)",
    ),
    Seam(
        "processes of workers are known by their name",
        "v1.executor.multiproc_executor:WorkerProc.make_worker_process",
        'name=f"VllmWorker-{rank}",',
    ),
]
