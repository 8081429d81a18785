"""One step of all canvases: what the slots hold is read, denoised, settled and written back.

In vLLM's speculative-decoding accounting the canvas is a set of draft tokens. A denoise step
samples 0 tokens and rejects the whole canvas, so the KV position stays. A finished canvas is
sampled at once if it is the last, or if the next step commits it beside the next canvas
(`spared_forwards.joins_commits`); else it has a commit, which samples the whole canvas and rejects
nothing. The phase lives on the device, so each step computes both outcomes and selects.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.config.denoise import read_denoise_config
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.denoise.acceptance import Reveal
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.denoise.noise import StepNoise, step_noise
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import AnswerOnly, CanvasState, denoise_step
from vllm_dllm.denoise.temperature import temperature
from vllm_dllm.metrics.canvas_numbers import CanvasNumbers
from vllm_dllm.requests.ends import EVERY_BLOCK, is_last_block
from vllm_dllm.requests.options import fitted_width
from vllm_dllm.scheduling.spared_forwards import spares_last_commit
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_record import StepCanvases
from vllm_dllm.step.canvas_stages import Advanced, Denoised, Found, Settled
from vllm_dllm.step.counted import canvas_numbers, to_host
from vllm_dllm.step.grammars import Legal
from vllm_dllm.step.load import LoadStages
from vllm_dllm.step.logits import CanvasLogits, StreamedLogits, WholeLogits
from vllm_dllm.step.requests import StepRequests
from vllm_dllm.step.sampling_memory import SamplingMemory
from vllm_dllm.step.settings import SlotSettings, StepSettings, revealing
from vllm_dllm.step.slots import CanvasSlots, SlotNumbers
from vllm_dllm.step.soft_embedding import SoftEmbedding


class CanvasStep:
    """Owns the requests' slots, the canvases of the current step and the phase of each."""

    self_conditions = True  # each step reads the one before's expected embeddings

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        sampler: Any,  # vLLM's own, for its per-request states
        device: torch.device,
    ) -> None:
        assert vllm_config.diffusion_config is not None, "vLLM makes it for diffusion architectures"
        model_config = vllm_config.model_config
        self.model = model
        self.canvas_length = vllm_config.diffusion_config.canvas_length
        self.vocab_size = model_config.get_vocab_size()
        self.max_model_len = model_config.max_model_len
        self.extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        self.memory = SamplingMemory(self.extension.sampling_memory_mib << 20)
        self.device = device
        self.fuses = device.type == "cuda"  # runs our kernels in place of many small operations

        self.batch: CanvasBatch | None = None  # from `begin` to `advance`
        self._numbers: CanvasNumbers | None = None  # from `advance` to `take_numbers`
        self.slots = CanvasSlots(
            sampler.req_states.draft_tokens[:, : self.canvas_length],
            model_config.hf_text_config.hidden_size if self.self_conditions else 0,
            model_config.dtype,
        )
        self.requests = self._make_requests(vllm_config, sampler)
        self._spares_last_commit = spares_last_commit(vllm_config)
        self.soft_embedding = SoftEmbedding(
            model,
            self.extension.self_conditioning_tolerance,
            self.extension.self_conditioning_top_k,
        )

    def _make_requests(self, vllm_config: VllmConfig, sampler: Any) -> StepRequests:
        config, num_slots = read_denoise_config(vllm_config), len(self.slots.canvas)
        return StepRequests(
            self.slots,
            sampler,
            SlotSettings(
                config,
                LoadStages(self.extension.load_stages, self.device),
                num_slots,
                self.canvas_length,
                self.device,
            ),
            self.extension,
            vllm_config,
        )

    def num_recomputed(self, input_batch: InputBatch) -> torch.Tensor | None:
        """[num_reqs] int64: of each request's known tokens in this step, those whose keys and
        values the next step computes anew. None: of no request."""
        return None

    def begin(self, input_batch: InputBatch) -> None:
        """Before the forward: which canvases it holds."""
        self.batch = None
        if input_batch.num_draft_tokens > 0:
            self.batch = CanvasBatch.build(input_batch, self.canvas_length, self.device)

    def start_canvases(
        self,
        source: torch.Tensor,  # [rows, V], or hidden states
        input_batch: InputBatch,
    ) -> torch.Tensor:
        """After the forward, before `advance`: gives requests whose prefill it ended what their
        first canvas takes from it. Returns the rows that are canvases'."""
        return source

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the logits asked for next are the canvases', and these are read tile by tile."""
        return self.batch is not None and self.model.streams_vocabulary

    def condition(
        self,
        plain: torch.Tensor,  # [T, H] embeddings of the step's tokens
        out: torch.Tensor,  # [T, H]
    ) -> None:
        """Self-conditions the rows that are being denoised.

        Once, over the canvas rows of all requests. A commit's rows go through too and keep their
        plain embeddings: the output norm would change them even for a zero signal.
        """
        batch = self.batch
        if batch is None:
            out.copy_(plain)
            return
        of_canvases = plain if batch.tokens is None else plain[batch.tokens]
        soft = batch.flatten(self.slots.soft_embeds[batch.slot_index])
        committing = batch.by_row(self.slots.is_committing(batch.slot_index))[:, None]
        conditioned = self.model.self_conditioning(of_canvases, soft)
        if batch.tokens is None:
            torch.where(committing, plain, conditioned, out=out)
        else:
            out.copy_(plain)
            out[batch.tokens] = torch.where(committing, of_canvases, conditioned)

    def advance(
        self,
        source: torch.Tensor,  # [rows, V] fp32 soft-capped logits, or [rows, H] hidden states
        input_batch: InputBatch,
    ) -> Advanced:
        """After the forward: denoises or commits each canvas that `begin` found."""
        batch, self.batch = self.batch, None
        assert batch is not None, "begin comes first"
        found = self._read(batch, input_batch)
        if self.fuses and self._is_plain(found):
            return self._advance_plain(found, source)
        denoised = self._denoise(found, source)
        settled = self._settle(found, denoised)
        # Before anything is written: it may apply the step's rules again.
        logprobs = self.requests.logprobs.report(
            denoised.logits,
            denoised.row_temperature,
            denoised.outcome.state.best_guess,
            batch,
            input_batch.num_reqs,
            settled.at_once,
            found.cut,
        )
        canvas = self._write(found, denoised, settled)
        if found.cut is not None and found.earlier is not None:
            self.slots.take_back(batch.slot_index, found.cut, found.earlier)
            self.requests.grammars.start(within_s=0)
        self.requests.filters.count_emitted(batch, settled.best_guess, settled.emitted)
        self._committed(found, settled)
        if self.requests.observers.look_at(batch):
            outcome = denoised.outcome
            shown = StepCanvases(
                tokens=outcome.state.best_guess,
                accepted=outcome.accepted,
                next_canvas=canvas,
                entropy_nats=denoised.stats.entropy_nats,
                step=outcome.state.steps_done,
                temperature=denoised.temperature,
                start=found.starts,
                denoises=settled.denoises,
                finished=settled.finished,
            )
            self.requests.observers.show(shown, batch, input_batch.req_ids)
        if self.requests.are_counted or denoised.is_committed is not None:
            self._numbers = canvas_numbers(
                batch,
                denoised.outcome,
                denoised.stats.entropy_nats,
                settled.denoises,
                denoised.is_committed,
            )
        return Advanced(settled.best_guess, settled.emitted, settled.committed, logprobs)

    def _committed(self, found: Found, settled: Settled) -> None:
        """The step's blocks are written and counted, where it emits them."""

    def _is_plain(self, found: Found) -> bool:
        """Whether nothing stands between the canvases' statistics and their next states but numbers
        of `Settings`."""
        settings = found.settings
        reveals = not isinstance(settings, StepSettings) or settings.reveal is not None
        return found.cut is None and not reveals and self.requests.are_plain(found.batch)

    def _advance_plain(self, found: Found, source: torch.Tensor) -> Advanced:
        """`advance` in few launches."""
        from vllm_dllm.step.settle_triton import NAMES, Emits, settle  # needs Triton

        batch, requests, settings = found.batch, self.requests, found.settings
        assert isinstance(settings, StepSettings) and isinstance(requests.settings, SlotSettings)
        logits = self._logits(found, source, None)
        step_temperature, drawn = self._draw(found, settings)
        row_temperature = batch.by_row(step_temperature)[:, None]
        stats, soft_rows = logits.read(row_temperature, batch.flatten(drawn.candidate))
        settled = settle(
            stats,
            drawn,
            batch,
            found.block_ends,
            self.slots,
            requests.settings,
            Emits(self._spares_last_commit, requests.prefills_emitted_tokens),
        )
        soft = batch.unflatten(soft_rows)
        self.slots.soft_embeds[batch.slot_index] = soft.masked_fill_(
            settled.ended[:, None, None], 0.0
        )
        requests.filters.count_emitted(batch, settled.best_guess, settled.emitted)
        if requests.are_counted:
            self._numbers = to_host(batch, NAMES, settled.counted)
        committed = None if requests.prefills_emitted_tokens else settled.emitted
        return Advanced(settled.best_guess, settled.emitted, committed, None)

    def take_numbers(self) -> CanvasNumbers | None:
        """Of the step just taken, for the metrics. None: nobody counts, or it had no canvas."""
        numbers, self._numbers = self._numbers, None
        return numbers

    def _read(self, batch: CanvasBatch, input_batch: InputBatch) -> Found:
        slots, idx = self.slots, batch.slot_index
        numbers = slots.read_numbers(idx)
        block_ends = input_batch.seq_lens[batch.request_index]
        starts = block_ends - batch.lengths
        num_stops = slots.num_stops[batch.slots_np].max()
        cut = self._cut_canvases(batch, numbers, starts, input_batch)
        compiling = self.requests.grammars.compiling(batch)
        if compiling is not None:
            cut = compiling if cut is None else cut | compiling
        return Found(
            batch,
            numbers,
            slots.read_tokens(idx),
            starts,
            block_ends,
            slots.stop_tokens[idx][:, :num_stops],
            self.requests.settings.of(batch),
            cut,
            None if cut is None else slots.progress(idx),
        )

    def _cut_canvases(
        self,
        batch: CanvasBatch,
        numbers: SlotNumbers,
        starts: torch.Tensor,  # [n] int64
        input_batch: InputBatch,
    ) -> torch.Tensor | None:
        """[n] bool: canvases of which the scheduler ran only a part, for lack of token budget, or
        more than there is, because it did not know yet that a block had ended.

        Such a step says nothing about the canvas: it is taken back, and the canvas is scheduled
        again. A canvas that ends where the context ends is not cut. None: surely none.
        """
        slots = batch.slots_np
        most_ends = input_batch.seq_lens_cpu_upper_bound.numpy()[batch.requests_np]
        if (most_ends <= self.slots.host("fitted_end", slots)).all() and (
            batch.cells is None or (batch.lengths_np == self.slots.host("width", slots)).all()
        ):
            return None
        room = self.max_model_len - starts
        width = torch.minimum(numbers.width, fitted_width(numbers.fitted_end - starts))
        return batch.lengths != torch.minimum(width, room)

    def _denoise(self, found: Found, source: torch.Tensor) -> Denoised:
        batch, numbers, tokens, settings = found.batch, found.numbers, found.tokens, found.settings
        assert isinstance(settings, StepSettings)
        slots, idx = self.slots, batch.slot_index
        # What was shown is what was guessed there, whatever a pin makes the canvas hold.
        reveal = revealing(settings, slots.revealed[idx], tokens.best_guess)
        logits = self._logits(found, source, reveal)
        step_temperature, drawn = self._draw(found, settings)
        row_temperature = batch.by_row(step_temperature)[:, None]
        legal = self._legal(found, logits, row_temperature, reveal)
        by_row, soft_rows = logits.read(row_temperature, batch.flatten(drawn.candidate))
        stats = RowStats(*(batch.unflatten(column) for column in by_row))
        if legal is not None:
            stats = legal.apply(stats)
        if settings.is_greedy is not None:
            greedy = torch.where(settings.is_greedy[:, None], stats.best_guess, stats.candidate)
            stats = stats._replace(candidate=greedy)
        answer_only = None
        if settings.judges_answer_only is not None:
            answer_only = AnswerOnly(settings.judges_answer_only, found.stops)
        outcome = denoise_step(
            stats,
            batch.valid,
            CanvasState(
                tokens.best_guess, numbers.times_repeated, numbers.steps_done, numbers.num_steps
            ),
            drawn.renoise,
            settings.rules,
            reveal,
            answer_only,
            None if legal is None else legal.constrained,
        )
        next_canvas = drawn.next_canvas if legal is None else legal.begin(drawn.next_canvas)
        revealed = None if settings.reveal is None else outcome.accepted
        return Denoised(
            logits,
            step_temperature,
            row_temperature,
            stats,
            soft_rows,
            next_canvas,
            outcome,
            revealed,
        )

    def _draw(self, found: Found, settings: StepSettings) -> tuple[torch.Tensor, StepNoise]:
        """The temperature [n] fp32 and the noise of each canvas."""
        numbers, t_min, t_span = found.numbers, settings.t_min, settings.t_span
        key, starts, lengths = numbers.noise_key, found.starts, found.batch.lengths
        done, most = numbers.steps_done, numbers.num_steps
        if self.fuses:
            from vllm_dllm.denoise.draws_triton import temperature_and_noise  # needs Triton

            of_vocabulary = self.canvas_length, self.vocab_size
            return temperature_and_noise(
                key, starts, lengths, done, most, t_min, t_span, *of_vocabulary
            )
        drawn = step_noise(key, starts, lengths, done, self.canvas_length, self.vocab_size)
        return temperature(done, most, t_min, t_span), drawn

    def _logits(
        self,
        found: Found,
        source: torch.Tensor,  # see `advance`
        reveal: Reveal | None,
    ) -> CanvasLogits:
        kind = StreamedLogits if self.model.streams_vocabulary else WholeLogits
        return kind(
            source,
            found.batch,
            found.starts,
            found.tokens.best_guess,
            self.soft_embedding,
            self.requests.filters,
            self.memory,
            None if reveal is None else torch.where(reveal.kept, reveal.tokens, NO_TOKEN),
        )

    def _legal(
        self,
        found: Found,
        logits: CanvasLogits,
        row_temperature: torch.Tensor,  # [rows, 1] fp32
        reveal: Reveal | None,
    ) -> Legal | None:
        grammars = self.requests.grammars
        if not grammars.concern(found.batch):
            return None
        skipped = found.numbers.is_committing == 1
        if found.cut is not None:
            skipped |= found.cut
        return grammars.legal(
            found.batch,
            found.starts,
            skipped,
            found.numbers.steps_done,
            logits,
            row_temperature,
            reveal,
        )

    def _settle(self, found: Found, denoised: Denoised) -> Settled:
        outcome, committing = denoised.outcome, found.numbers.is_committing == 1
        denoises = ~committing
        finished = outcome.finished & denoises
        best_guess = torch.where(
            committing[:, None], found.tokens.best_guess, outcome.state.best_guess
        )
        at_once = finished & self._emits_at_once(best_guess, found)
        if denoised.is_committed is not None:
            at_once |= finished & denoised.is_committed
        ends = committing | at_once
        emitted = found.batch.lengths * ends
        if found.cut is not None:
            emitted, denoises = torch.where(found.cut, 0, emitted), denoises & ~found.cut
        committed = None
        if not self.requests.prefills_emitted_tokens:
            committed = emitted
        elif denoised.is_committed is not None:
            committed = emitted * denoised.is_committed
        return Settled(denoises, best_guess, finished, at_once, ends, emitted, committed)

    def _emits_at_once(
        self,
        blocks: torch.Tensor,  # [n, C] int64
        found: Found,
    ) -> torch.Tensor | bool:
        """[n] bool: blocks that are emitted by the step that finishes them."""
        if self._spares_last_commit and self.requests.prefills_emitted_tokens:
            return True
        request_ends = found.numbers.end
        is_last = is_last_block(
            blocks, found.batch.valid, found.block_ends, request_ends, found.stops
        )
        if self._spares_last_commit:
            return is_last
        is_read_only = request_ends == EVERY_BLOCK
        return is_read_only | ~is_last if self.requests.prefills_emitted_tokens else is_read_only

    def _write(self, found: Found, denoised: Denoised, settled: Settled) -> torch.Tensor:
        """What the next step finds. Returns the canvases [n, C] as they would be denoised on."""
        slots, batch, outcome = self.slots, found.batch, denoised.outcome
        idx, finished, ended = batch.slot_index, settled.finished[:, None], settled.ends[:, None]
        canvas = torch.where(finished, settled.best_guess, outcome.canvas)
        # A canvas starts with none.
        drops_soft = ended[..., None]
        if self.requests.first_canvases.has_pins(batch):
            pinned = self.requests.first_canvases.keep_pins(idx, ended)
            canvas = torch.where(pinned & ~finished, found.tokens.first_canvas, canvas)
            drops_soft = drops_soft | pinned[..., None]
        next_canvas, guess = denoised.next_canvas, outcome.state.best_guess
        predictions = self.requests.predictions
        predicted = predictions.among(batch)
        if predicted is not None:
            may_move = self._first_of_several(found, denoised, settled)
            moved = predictions.realigned(predicted, guess, outcome.accepted, batch.valid, may_move)
            canvas, guess = moved.put(canvas), moved.put_guess(guess)
        guess = guess.masked_fill(ended, NO_TOKEN)
        if predicted is not None:
            expected = predictions.behind(predicted, settled.best_guess, settled.emitted)
            next_canvas = expected.put(next_canvas)
            guess = torch.where(ended, expected.guess, guess)
        slots.canvas[idx] = torch.where(ended, next_canvas, canvas)
        slots.soft_embeds[idx] = batch.unflatten(denoised.soft_rows).masked_fill_(drops_soft, 0.0)
        if denoised.revealed is not None:
            slots.revealed[idx] = denoised.revealed & ~ended
        slots.write(
            idx,
            guess,
            outcome.state.steps_done.masked_fill(settled.ends, 0),
            settled.finished & ~settled.at_once,
            outcome.state.times_repeated,
        )
        return canvas

    def _first_of_several(self, found: Found, denoised: Denoised, settled: Settled) -> torch.Tensor:
        """[n] bool: canvases that had their first step and are denoised on, none of whose tokens
        are shown for good."""
        is_first = denoised.outcome.state.steps_done == 1
        found_so = settled.denoises & ~settled.finished & is_first
        reveal = found.settings.reveal if isinstance(found.settings, StepSettings) else None
        return found_so if reveal is None else found_so & ~reveal[0]
