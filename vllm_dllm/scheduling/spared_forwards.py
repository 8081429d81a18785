"""Says which forwards requests do without. The scheduler decides, and marks each request for the
worker (`requests.options`), whose copy of the configuration may differ."""

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode

from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.workers import JOIN_COMMITS


def joins_canvases(vllm_config: VllmConfig) -> bool:
    """Returns whether a canvas may share the forward of the tokens before it. Their query rows lie
    side by side: the tokens' rows are causal, and the canvas' rows see everything. Not with a KV
    connector, which is told a step's tokens before the canvas is added. Not under a full CUDA graph
    of mixed batches, which has no room for requests that attention sees as two."""
    graphs = vllm_config.compilation_config.cudagraph_mode
    full = graphs is not None and graphs.mixed_mode() == CUDAGraphMode.FULL
    return vllm_config.kv_transfer_config is None and not full


def joins_commits(vllm_config: VllmConfig) -> bool:
    """Returns whether a finished block is emitted at once and committed in its successor's first
    forward. Not with asynchronous scheduling: it plans a step before the tokens of the previous one
    are known, so the step has no rows for both."""
    return has_own_steps(vllm_config) and not vllm_config.scheduler_config.async_scheduling


def has_own_steps(vllm_config: VllmConfig) -> bool:
    """Returns whether a canvas may share the forward of emitted tokens: only our workers can read
    those again."""
    worker_cls = vllm_config.parallel_config.worker_cls
    return joins_canvases(vllm_config) and worker_cls in JOIN_COMMITS


def spares_last_commit(vllm_config: VllmConfig) -> bool:
    """Returns whether a request's last block is emitted without a commit. Not with a KV connector,
    which would store or send what a denoise step left in the cache."""
    config = ExtensionConfig.from_additional_config(vllm_config.additional_config)
    return not config.commit_last_block and vllm_config.kv_transfer_config is None
