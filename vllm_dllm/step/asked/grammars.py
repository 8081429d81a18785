"""Grammars of uniform canvases: in each step, a canvas' best guess is a legal path.

The path is found on the host, so a step with such a canvas waits for the device. Steps without one
do not.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.compat.grammar import serialize_grammar
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.rules import Reveal
from vllm_dllm.denoise.step import LegalPaths
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.state import GrammarState, Reasoning
from vllm_dllm.grammar.walk import LegalPath, StuckError
from vllm_dllm.requests.ends import EVERY_BLOCK
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.requests.structured_outputs import grammar_compiler, parse_exclusions
from vllm_dllm.step.asked.answer import Answer, KeptMarks, read_canvas_rows
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.canvas_logits import CanvasLogits, RowMasks
from vllm_dllm.step.slots import CanvasSlots, NewRequest, Registry

logger = init_logger(__name__)

COMPILED_WITHIN_S = 0.02
"""Seconds that a step waits for grammars. Most take one or two milliseconds. The canvas of a slower
one sits steps out, while other canvases go on."""
HELD_STEPS = 4
"""How many of a canvas' first steps draw candidates and expected embeddings of legal tokens only.
Where the model is still unsure after these steps, the rule would keep the canvas from converging.
The best guess is a legal path in all steps."""
_NONE = -1  # no token


class Legal(NamedTuple):
    """The legal paths of a step's n canvases."""

    constrained: LegalPaths
    guess: torch.Tensor  # [n, C] int64, the paths; -1 where there is none
    logprob: torch.Tensor  # [n, C] fp32, of the path's tokens
    next_forced: torch.Tensor  # [n, C] int64, tokens that begin the next canvases; -1: none

    def apply(self, stats: RowStats) -> RowStats:
        """Returns `stats`, fields [n, C], with the legal paths' tokens and log-probabilities in
        place of the best guesses."""
        differs = (self.guess != _NONE) & (self.guess != stats.best_guess)
        return stats._replace(
            best_guess=torch.where(differs, self.guess, stats.best_guess),
            best_logprob=torch.where(differs, self.logprob, stats.best_logprob),
        )

    def force_starts(self, next_canvas: torch.Tensor) -> torch.Tensor:
        """Returns `next_canvas` [n, C] int64 with the forced tokens at the start of each canvas."""
        return torch.where(self.next_forced == _NONE, next_canvas, self.next_forced)


class CanvasGrammars(Registry):
    """Keeps the grammars of requests by slot, and finds the legal paths of their canvases. A
    request without a grammar has no entry."""

    def __init__(
        self, vllm_config: VllmConfig, req_states: RequestState, slots: CanvasSlots
    ) -> None:
        self._config, self._req_states, self._slots = vllm_config, req_states, slots
        self._device = slots.canvas.device
        self._answers: dict[int, Answer] = {}
        self._kept = KeptMarks()
        self._added: dict[int, int] = {}  # slot -> absolute position where its canvas begins
        # Tensor-parallel workers must denoise the same canvases: they wait for the slowest.
        self._waits = vllm_config.parallel_config.tensor_parallel_size > 1
        self._compiler: ThreadPoolExecutor | None = None

    # --- requests ---------------------------------------------------------------------------

    def add_request(self, request: NewRequest) -> None:
        """Starts to compile the request's grammar in a thread. Does nothing if it has none."""
        params = request.params
        if params.structured_outputs is None:
            return
        if self._compiler is None:
            self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        # `ignore_eos` leaves vLLM the request's own stop tokens.
        stops = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
        req_id = self._req_states.index_to_req_id[request.slot]
        self._answers[request.slot] = Answer(
            self._compiler.submit(self._compile, params, frozenset(stops), request.options),
            position=request.prompt_len,
            end=int(self._slots.host_values("end", np.array([request.slot]))[0]),
            wanted_stop=params.eos_token_id,
            goes_on=params.ignore_eos,
            kept=self._kept.pop(req_id),
        )
        self._added[request.slot] = request.prefill_len

    def _compile(
        self, params: SamplingParams, stops: frozenset[int], options: RequestOptions
    ) -> GrammarState:
        """Compiles a request's grammar in the compiler's thread. Returns the state in which its
        answer begins."""
        assert params.structured_outputs is not None
        reasoning = None if options.reasoning is None else Reasoning(*options.reasoning)
        model_config = self._config.model_config
        tokenizer = cached_tokenizer_from_config(model_config)
        grammars = grammar_compiler(tokenizer, model_config.get_vocab_size())
        text = serialize_grammar(params.structured_outputs, self._config.structured_outputs_config)
        exclusions = parse_exclusions(params, options.constrained, grammars.vocabulary.size)
        return grammars.start_state(text, stops, exclusions, params.min_tokens, reasoning)

    def apply_staged_writes(self, within_s: float = COMPILED_WITHIN_S) -> None:
        """Waits at most `within_s` seconds until new requests' grammars are compiled, and without
        limit under tensor parallelism. Writes the forced start of each compiled grammar into its
        slot's canvas. Called again after each step that a canvas sat out (`still_compiling`)."""
        if not self._added:
            return
        added = {self._answers[slot].grammar for slot in self._added}
        done = wait(added, None if self._waits else within_s).done
        for slot, begin in list(self._added.items()):
            if self._answers[slot].grammar not in done:
                continue
            del self._added[slot]
            if (answer := self._update_answer(slot, begin)) is not None:
                self._write_forced_start(slot, answer)

    def _write_forced_start(self, slot: int, answer: Answer) -> None:
        """Writes the tokens that the grammar forces at the answer's start to the slot's canvas."""
        forced = answer.state.forced_tokens()[: self._slots.canvas.shape[1]]
        self._slots.canvas[slot, : len(forced)] = self._to_device(forced)

    def remove_request(self, slot: int) -> None:
        """Forgets the slot's grammar. Keeps its marks: the request may have been preempted."""
        self._added.pop(slot, None)
        if (answer := self._answers.pop(slot, None)) is not None:
            self._kept.save(self._req_states.index_to_req_id[slot], answer)

    def _update_answer(self, slot: int, begin: int) -> Answer | None:
        """Moves the slot's answer on to absolute position `begin` by the emitted tokens, and
        returns it. Returns None if the grammar has ended or is given up. Waits until the grammar is
        compiled, and for the device if tokens were emitted."""
        answer = self._answers[slot]
        if (error := answer.grammar.exception()) is not None:  # waits
            self._give_up(slot, str(error))
            return None
        emitted = []
        # A step that was under way when the answer ended also finds the free rows behind its end.
        if answer.position < (end := min(begin, answer.end)):
            emitted = self._req_states.all_token_ids.gpu[slot][answer.position : end].tolist()
        if (rejected := answer.begin_canvas(begin, emitted)) is not None:
            self._give_up(slot, f"it rejects the emitted token {rejected}")
            return None
        return None if answer.state.has_ended else answer

    def _give_up(self, slot: int, why: str) -> None:
        """Forgets the slot's grammar, and logs `why` as an error. The scheduler checks what is
        emitted, and ends the request with an error if it is illegal. After a preemption the grammar
        is compiled and tried again, from the marks that are kept."""
        req_id = self._req_states.index_to_req_id[slot]
        # %r: a client may have chosen the id, with line breaks.
        logger.error("Request %r goes on without its grammar: %s.", req_id, " ".join(why.split()))
        self.remove_request(slot)

    def cut_answers(self, batch: CanvasBatch) -> list[int]:
        """Returns batch indices of requests whose answers are closed since their tokens run out."""
        cut = {slot for slot, answer in self._answers.items() if answer.is_cut}
        return [int(batch.requests_np[i]) for i in batch.canvases_in(cut)] if cut else []

    # --- a step -----------------------------------------------------------------------------

    def still_compiling(self, batch: CanvasBatch) -> torch.Tensor | None:
        """Returns [n] bool: canvases whose grammar is not compiled yet. Their step is taken back.
        Returns None if all grammars are compiled."""
        if not self._added:
            return None
        waiting = [slot in self._added for slot in batch.slots_list]
        return self._to_device(waiting) if any(waiting) else None

    def canvases_with_grammar(self, batch: CanvasBatch) -> list[int]:
        """Returns the indices of canvases whose requests have a grammar."""
        return batch.canvases_in(self._answers)

    def any_in(self, batch: CanvasBatch) -> bool:
        """Returns whether any request of the batch has a grammar."""
        return batch.any_in(self._answers.keys())

    def find_legal_paths(
        self,
        batch: CanvasBatch,
        starts: torch.Tensor,  # [n] int64, absolute position of each canvas' first token
        skipped: torch.Tensor,  # [n] bool, canvases that are committed, or whose step is taken back
        steps_done: torch.Tensor,  # [n] int64, of each canvas before this step
        logits: CanvasLogits,
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        revealing: Reveal | None,
    ) -> Legal:
        """Finds the legal path of each canvas with a grammar. Excludes illegal tokens from
        `logits`, in place, for canvases in their first `HELD_STEPS` steps and for canvases that
        reveal tokens permanently. Waits for the device."""
        mine = self.canvases_with_grammar(batch)
        n, C = batch.num_canvases, batch.canvas_length
        guess = np.full((n, C), _NONE, dtype=np.int64)
        following = np.full((n, C), _NONE, dtype=np.int64)
        logprob = np.zeros((n, C), dtype=np.float32)
        forced = np.zeros((n, C), dtype=bool)
        is_held = steps_done < HELD_STEPS
        if revealing is not None:
            is_held |= revealing.is_chosen
        on_host = torch.stack((starts, skipped.long(), is_held.long())).tolist()
        for i in mine:
            begin, is_skipped, holds = (column[i] for column in on_host)
            path = None
            if not is_skipped:
                path = self._find_path(i, begin, batch, logits, row_temperature, revealing)
            if path is not None:
                guess[i, : len(path.tokens)] = path.tokens
                logprob[i, : len(path.tokens)] = path.logprobs
                if holds:
                    forced[i, list(path.forced)] = True
                if holds and path.masks:
                    rows = sorted(path.masks)
                    words = np.stack([path.masks[row] for row in rows])
                    logits.exclude(i, RowMasks(np.array(rows), words))
            if (answer := self._answers.get(batch.slots_list[i])) is not None:
                next_forced = answer.next_forced[:C]
                following[i, : len(next_forced)] = next_forced
        tokens = self._to_device(np.stack((guess, following)))
        is_forced = self._to_device(forced)
        has_path = tokens[0] != _NONE
        is_chosen = has_path.any(dim=-1)
        constrained = LegalPaths(is_chosen, is_forced, free=is_chosen[:, None] & ~has_path)
        return Legal(constrained, tokens[0], self._to_device(logprob), tokens[1])

    def _find_path(
        self,
        i: int,
        begin: int,  # absolute position of the canvas' first token
        batch: CanvasBatch,
        logits: CanvasLogits,
        row_temperature: torch.Tensor,
        revealing: Reveal | None,
    ) -> LegalPath | None:
        """Returns the legal path of canvas i, and keeps the tokens that it forces on the next
        canvas. Returns None if the grammar has ended or is given up, or if no position of the
        canvas belongs to the answer. Waits for the device."""
        slot = batch.slots_list[i]
        if (answer := self._update_answer(slot, begin)) is None:
            return None
        num_tokens = answer.end - begin
        if answer.end == EVERY_BLOCK:
            num_tokens = int(batch.lengths_np[i])
        if num_tokens <= 0:
            return None
        rows = read_canvas_rows(logits, i, row_temperature[batch.rows_of(i)], revealing)
        try:
            found = constrain_canvas(answer.state, rows, num_tokens, answer.stop_token)
        except StuckError as error:
            self._give_up(slot, str(error))
            return None
        answer.next_forced, answer.is_cut = found.next_forced, found.is_cut
        return found.path

    def _to_device(self, values: np.ndarray | Sequence[int]) -> torch.Tensor:
        return async_tensor_h2d(np.asarray(values), device=self._device)
