"""CUDA graphs of what a step of whole canvases launches around its forward: causal flags,
embeddings and self-conditioning before it, all that `UniformStep` does after it.

They exist where vLLM captures forwards, for every number of canvases up to its largest graph's.
Graphs read the runner's buffers and the slots, whose addresses do not change, so a replay computes
what the step would.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from vllm.config import VllmConfig

from vllm_dllm.compat.gpu import Capture
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.uniform.settle_triton import PlainSettled
from vllm_dllm.step.uniform.uniform_step import UniformStep


def can_be_captured(step: UniformStep, vllm_config: VllmConfig) -> bool:
    """Returns whether plain steps can be CUDA graphs: they never wait for the device, and their
    forwards compute the runner's own rows."""
    parallel, soft = vllm_config.parallel_config, step.soft_embedding
    is_exact = not soft.tolerance and soft.top_k is None
    is_whole = parallel.prefill_context_parallel_size == 1
    return is_exact and is_whole and bool(step.model.streams_vocabulary)


class _Captured(NamedTuple):
    """The graphs around the forward of a step, captured for one number of canvases."""

    before: torch.cuda.CUDAGraph  # what is launched before the forward
    after: torch.cuda.CUDAGraph  # and after it
    settled: PlainSettled  # what a replay of `after` writes


class StepGraphs:
    """The CUDA graphs before and after the forward, for each number of whole canvases."""

    def __init__(
        self,
        most: int,  # most canvases of a step
        soft_embeds: torch.Tensor,  # [R, C, H], the slots'
        *,
        joins_commits: bool,  # as `StepRequests.joins_commits` while they are replayed
        forward_output: torch.Tensor | None,  # [rows, H], where captured forwards leave theirs
    ) -> None:
        self.joins_commits = joins_commits
        self.forward_is_captured = False
        """Whether the step's forward is a captured one, and `forward_output` has its result."""
        _, canvas_length, hidden_size = soft_embeds.shape
        self._slots = soft_embeds.new_zeros(most, dtype=torch.int64)  # of the step's canvases
        num_rows = most * canvas_length
        if forward_output is not None and len(forward_output) < num_rows:
            forward_output = None  # the user's sizes leave captured forwards smaller than a step
        self._forward_output = forward_output
        if forward_output is None:
            forward_output = soft_embeds.new_zeros(num_rows, hidden_size)
        self._hidden = forward_output
        # The largest comes first: the others reuse its memory.
        self._batches = [
            CanvasBatch.of_whole_canvases(self._slots[:n], canvas_length)
            for n in range(most, 0, -1)
        ]
        self._captured: dict[int, _Captured] = {}  # by number of canvases
        self._latest: CanvasBatch | None = None  # whose slots are in `_slots`

    def capture(
        self,
        capture: Capture,
        before: Callable[[CanvasBatch], None],
        after: Callable[[CanvasBatch, torch.Tensor], PlainSettled],  # of hidden states [n * C, H]
    ) -> None:
        """Captures, for each number of canvases, a graph of what `before` launches and one of what
        `after` launches."""
        for batch in self._batches:
            hidden = self._hidden[: batch.num_canvases * batch.canvas_length]
            graph_before, _ = capture(partial(before, batch))
            graph_after, settled = capture(partial(after, batch, hidden))
            self._captured[batch.num_canvases] = _Captured(graph_before, graph_after, settled)

    def can_replay(self, batch: CanvasBatch | None) -> bool:
        """Returns whether there are graphs for a step of these canvases: they are whole, have no
        other rows beside them, and their number was captured. False for None."""
        if batch is None or batch.cells is not None or batch.tokens is not None:
            return False
        return batch.num_canvases in self._captured

    def replay_before(self, batch: CanvasBatch) -> None:
        """Replays the graph of what a step launches before its forward. `can_replay` must hold."""
        self._load_slots(batch).before.replay()

    def replay_after(
        self,
        batch: CanvasBatch,
        hidden: torch.Tensor,  # [n * C, H]
    ) -> PlainSettled:
        """Replays the graph of what a step launches after its forward, and returns what became of
        the canvases. A captured forward has left `hidden` where the graph reads it. Only `told` is
        a copy: the next replay overwrites `flags` and `counted`."""
        captured = self._load_slots(batch)
        if self._forward_output is None or not self.forward_is_captured:
            self._hidden[: len(hidden)].copy_(hidden)
        captured.after.replay()
        # The next replay may come before these are on the host.
        return captured.settled._replace(told=captured.settled.told.clone())

    def _load_slots(self, batch: CanvasBatch) -> _Captured:
        """Copies the batch's slots to where graphs read them. Returns the graphs of its size."""
        if batch is not self._latest:
            self._slots[: batch.num_canvases].copy_(batch.slots)
            self._latest = batch
        return self._captured[batch.num_canvases]
