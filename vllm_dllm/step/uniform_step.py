"""One step of canvases that start as uniform noise and whose every position may change again:
DiffusionGemma's.

Each step draws a candidate for each position, keeps those that it accepts and draws the others
anew. It reads the expected embeddings of the step before, and a commit's rows do not.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.config.denoise import read_denoise_config
from vllm_dllm.denoise.acceptance import Reveal
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.denoise.noise import StepNoise, step_noise
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import AnswerOnly, CanvasState, denoise_step
from vllm_dllm.denoise.temperature import temperature
from vllm_dllm.step.canvas_stages import Advanced, Denoised, Found
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.counted import to_host
from vllm_dllm.step.grammars import Legal
from vllm_dllm.step.load import LoadStages
from vllm_dllm.step.logits import CanvasLogits, StreamedLogits, WholeLogits
from vllm_dllm.step.requests import StepRequests
from vllm_dllm.step.settings import SlotSettings, StepSettings, revealing


class UniformStep(CanvasStep):
    self_conditions = True

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

    def _advance(self, found: Found, source: torch.Tensor, input_batch: InputBatch) -> Advanced:
        if self.fuses and self._is_plain(found):
            return self._advance_plain(found, source)
        return super()._advance(found, source, input_batch)

    def _is_plain(self, found: Found) -> bool:
        """Whether nothing stands between the canvases' statistics and their next states but numbers
        of `Settings`."""
        assert isinstance(found.settings, StepSettings)
        reveals = found.settings.reveal is not None
        return found.cut is None and not reveals and self.requests.are_plain(found.batch)

    def _advance_plain(self, found: Found, source: torch.Tensor) -> Advanced:
        """`_advance` in few launches."""
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
            Emits(self.settling.spares_last_commit, requests.prefills_emitted_tokens),
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
