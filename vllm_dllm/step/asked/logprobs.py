"""Which log-probabilities a step reports, to the requests that ask for them."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.step.asked.logits import CanvasLogits
from vllm_dllm.step.asked.logprob_tensors import (
    LogprobRequest,
    choose,
    concat,
    first_rows_of,
    joined,
    padded,
    token_logprobs,
)
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.registry import NewRequest


class StepLogprobs:
    """Log-probabilities by slot; only requests that ask for log-probabilities are in here."""

    def __init__(self, mode: str, vocab_size: int, device: torch.device) -> None:
        self.reports_logits = mode in ("raw_logits", "processed_logits")
        self.reports_processed = mode in ("processed_logits", "processed_logprobs")
        self.vocab_size = vocab_size
        self.device = device
        self._requests: dict[int, LogprobRequest] = {}
        # Of the slot's latest step that was not taken back, as many rows as a canvas may have.
        self._latest: dict[int, LogprobsTensors] = {}
        # Logits [V] by which the first token of the slot's canvas was chosen.
        self._seeds: dict[int, torch.Tensor] = {}
        self._read_only: set[int] = set()
        self._constrained: set[int] = set()

    def add(self, request: NewRequest) -> None:
        slot, params, options = request.slot, request.params, request.options
        count = params.logprobs
        token_ids = tuple(params.logprob_token_ids or ())
        if count is None and not token_ids:
            return
        self._requests[slot] = LogprobRequest(
            self.vocab_size if count == -1 else count or 0,
            async_tensor_h2d(np.array(token_ids, dtype=np.int64), device=self.device),
        )
        if options.read_only:
            self._read_only.add(slot)
        if options.constrained:
            self._constrained.add(slot)

    def start(self) -> None:
        """Nothing waits."""

    def drop(self, slot: int) -> None:
        self._requests.pop(slot, None)
        self._latest.pop(slot, None)
        self._seeds.pop(slot, None)
        self._read_only.discard(slot)
        self._constrained.discard(slot)

    def concern(self, batch: CanvasBatch) -> bool:
        return not self._requests.keys().isdisjoint(batch.slots_np.tolist())

    def keep_seeds(
        self,
        slots: list[int],
        logits: torch.Tensor,  # [n, V] fp32
        is_new: torch.Tensor | None,  # [n] bool, the others keep what they have; None: all are
    ) -> None:
        """Keeps the logits of a known first token: no later forward says how probable it is."""
        for i, slot in enumerate(slots):
            if slot in self._requests:
                before = self._seeds.get(slot)
                if is_new is None or before is None:
                    self._seeds[slot] = logits[i].clone()
                else:
                    self._seeds[slot] = torch.where(is_new[i], logits[i], before)

    def put_seeds(
        self,
        batch: CanvasBatch,
        logits: torch.Tensor,  # [rows, V] fp32, changed in place
        are_seeded: torch.Tensor,  # [n] bool, the others' first rows have logits of their own
    ) -> None:
        """Gives first rows the logits that were kept of them."""
        for i, slot in enumerate(batch.slots_np.tolist()):
            if (seed := self._seeds.get(slot)) is not None:
                first = batch.rows_of(i).start
                logits[first] = torch.where(are_seeded[i], seed, logits[first])

    def report(
        self,
        logits: CanvasLogits,
        row_temperature: torch.Tensor,  # [rows, 1]
        best_guess: torch.Tensor,  # [n, C] int64
        batch: CanvasBatch,
        num_reqs: int,  # of the whole batch
        at_once: torch.Tensor,  # [n] bool, blocks this step both decides and emits
        cut: torch.Tensor | None,  # [n] bool, steps that were taken back
    ) -> LogprobsTensors | None:
        """Scores of the blocks this step may emit: its own, or, if it commits, those of the step
        before, which are kept for it."""
        if not self.concern(batch):
            return None
        parts: list[LogprobsTensors] = []
        first_rows = [0] * num_reqs
        num_rows, end = 0, 0
        for i, (request, slot, length) in enumerate(
            zip(
                batch.requests_np.tolist(),
                batch.slots_np.tolist(),
                batch.lengths_np.tolist(),
                strict=True,
            )
        ):
            end += length
            wanted = self._requests.get(slot)
            if wanted is None:
                continue
            read_only = slot in self._read_only
            # A constrained request asks for probabilities among its choices.
            in_process = self.reports_processed or slot in self._constrained
            tiles, first = [], end - length
            for rows in logits.processed(i) if in_process else logits.raw(i):
                chosen = best_guess[i, first - end + length :][: len(rows)]
                # A read-only request asks what the model thinks, not what the schedule makes of it.
                scale = None if read_only else row_temperature[first : first + len(rows)]
                tiles.append(token_logprobs(rows, scale, chosen, wanted, self.reports_logits))
                first += len(rows)
            current = reported = joined(tiles)
            if not read_only:
                latest = padded(current, batch.canvas_length)
                if (before := self._latest.get(slot)) is not None:
                    reported = choose(at_once[i], current, first_rows_of(before, length))
                    # The host does not know whether the step was taken back.
                    latest = latest if cut is None else choose(cut[i], before, latest)
                self._latest[slot] = latest
            first_rows[request] = num_rows
            num_rows += len(reported.logprobs)
            parts.append(reported)
        return concat(parts, first_rows) if parts else None
