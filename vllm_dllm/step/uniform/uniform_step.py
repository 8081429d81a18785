"""One step of DiffusionGemma's canvases, which start as uniform noise and may change everywhere.

Each step draws a candidate for each position, keeps those that it accepts and replaces the others
by noise. Its rows read the expected embeddings of the step before; a commit's rows do not.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dllm.config.denoise import read_denoise_config
from vllm_dllm.denoise.noise import StepNoise, step_noise
from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.rules import NO_TOKEN, Reveal
from vllm_dllm.denoise.step import AnswerOnly, CanvasState, denoise_step, temperature
from vllm_dllm.step.asked.settings import LoadStages, SlotSettings, StepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.canvas_stages import Denoised, StepInputs, StepResult
from vllm_dllm.step.canvas_step import CanvasStep
from vllm_dllm.step.logits.canvas_logits import CanvasLogits, WholeLogits
from vllm_dllm.step.logits.filters import RuleContext
from vllm_dllm.step.logits.streamed_logits import StreamedLogits
from vllm_dllm.step.requests import StepRequests
from vllm_dllm.step.watched.observers import copy_numbers_to_host

if TYPE_CHECKING:
    from vllm_dllm.denoise.draws_triton import StepDraws
    from vllm_dllm.step.uniform.settle_triton import PlainSettled
    from vllm_dllm.step.uniform.step_graphs import StepGraphs


class _PlainStep(NamedTuple):
    """What became of plain canvases, and what scores of their tokens are computed from."""

    settled: "PlainSettled"
    logits: CanvasLogits
    row_temperature: torch.Tensor  # [rows, 1] fp32
    best_guess: torch.Tensor  # [rows] int64


class UniformStep(CanvasStep):
    """Denoises uniform canvases. On a GPU, steps of plain canvases run in fused kernels."""

    self_conditions = True
    graphs: "StepGraphs | None" = None  # none where vLLM captures no steps

    def _make_requests(self, vllm_config: VllmConfig, sampler: Any) -> StepRequests:
        """Returns the requests' state, with settings of uniform canvases."""
        self.slot_settings = SlotSettings(
            read_denoise_config(vllm_config),
            LoadStages(self.extension.load_stages, self.device),
            len(self.slots.canvas),
            self.canvas_length,
            self.device,
        )
        return StepRequests(self.slots, sampler, self.slot_settings, vllm_config)

    def condition(
        self,
        plain: torch.Tensor,  # [T, H] embeddings of the step's tokens
        batch: CanvasBatch | None,
        out: torch.Tensor,  # [T, H]
    ) -> None:
        """Writes the embeddings of a step's rows to `out`: self-conditioned ones for the rows that
        are denoised, `plain` ones for all others. It runs once, over the canvas rows of all
        requests. A commit's rows are included and keep their plain embeddings: the output norm
        would change them even for a zero signal."""
        if batch is None:
            out.copy_(plain)
            return
        if self.fuses:
            from vllm_dllm.step.uniform import condition_triton  # needs Triton

            condition_triton.condition(self.model.self_conditioning, plain, batch, self.slots, out)
            return
        of_canvases = plain if batch.tokens is None else plain[batch.tokens]
        soft = batch.flatten(self.slots.soft_embeds[batch.slot_index])
        committing = batch.expand_to_rows(self.slots.are_committing(batch.slot_index))[:, None]
        conditioned = self.model.self_conditioning(of_canvases, soft)
        if batch.tokens is None:
            torch.where(committing, plain, conditioned, out=out)
        else:
            out.copy_(plain)
            out[batch.tokens] = torch.where(committing, of_canvases, conditioned)

    def advance(
        self, batch: CanvasBatch, source: torch.Tensor, input_batch: InputBatch
    ) -> StepResult:
        """Denoises or commits the canvases, in fused kernels if all are plain."""
        if self.fuses and self._is_plain(batch):
            return self._advance_plain(batch, source, input_batch)
        return super().advance(batch, source, input_batch)

    def _is_plain(self, batch: CanvasBatch) -> bool:
        """Returns whether fused kernels can settle these canvases: they depend on statistics and on
        numbers of `Settings` alone."""
        return not self.slot_settings.reveals(batch) and self.requests.are_plain(batch)

    def _advance_plain(
        self, batch: CanvasBatch, source: torch.Tensor, input_batch: InputBatch
    ) -> StepResult:
        """Does what `_denoise_and_settle` does, in few launches."""
        from vllm_dllm.step.uniform.settle_triton import NAMES

        requests, logprobs = self.requests, None
        if self._has_graph(batch):
            assert self.graphs is not None
            settled = self.graphs.replay_after(batch, source)
        else:
            block_ends = input_batch.seq_lens[batch.request_index]
            reports = requests.logprobs.any_in(batch)
            step = self._settle_plain(batch, source, block_ends, requests.joins_commits, reports)
            settled = step.settled
            if reports:
                logprobs = requests.logprobs.report(
                    batch,
                    step.logits,
                    step.row_temperature,
                    batch.unflatten(step.best_guess),
                    num_reqs=input_batch.num_reqs,
                    at_once=settled.at_once,
                    cut=settled.cut,
                )
            requests.filters.count_emitted(batch, settled.best_guess, settled.emitted)
        if requests.are_counted:
            self._numbers = copy_numbers_to_host(batch, NAMES, settled.counted)
        return StepResult(settled.best_guess, settled.emitted, settled.rejected, logprobs)

    def _has_graph(self, batch: CanvasBatch) -> bool:
        """Returns whether a plain step of these canvases can be replayed: no request changes or
        reads its logits."""
        requests, graphs = self.requests, self.graphs
        if graphs is None or not graphs.can_replay(batch):
            return False
        changes = requests.filters.needs_whole_rows(batch) or requests.logprobs.any_in(batch)
        return graphs.joins_commits == requests.joins_commits and not changes

    def settle_whole(
        self,
        seq_lens: torch.Tensor,  # [>= n] int32, the runner's
        joins_commits: bool,
        batch: CanvasBatch,
        hidden: torch.Tensor,  # [n * C, H]
    ) -> "PlainSettled":
        """Settles a plain step of whole canvases after its forward; captured as a CUDA graph."""
        block_ends = seq_lens[: batch.num_canvases]
        return self._settle_plain(batch, hidden, block_ends, joins_commits).settled

    def _settle_plain(
        self,
        batch: CanvasBatch,
        source: torch.Tensor,  # see `advance`
        block_ends: torch.Tensor,  # [n] int32
        joins_commits: bool,
        reports: bool = False,
    ) -> _PlainStep:
        """Settles plain canvases in fused kernels, and writes their slots. `reports`: whether the
        logits are read again after that."""
        from vllm_dllm.step.uniform.settle_triton import Emits, settle, store_soft_embeds

        drawn = self._fused_draws(batch, block_ends)
        last_guess = self.slots.best_guess[batch.slot_index]
        if reports:
            last_guess = last_guess.clone()  # settling writes it, and a report reads it afterwards
        logits = self._wrap_logits(source, RuleContext(batch, drawn.starts, last_guess))
        row_temperature = batch.flatten(drawn.temperature)[:, None]
        stats, soft_rows = logits.read(row_temperature, batch.flatten(drawn.noise.candidate))
        settled = settle(
            stats,
            drawn.noise,
            batch,
            block_ends,
            max_model_len=self.requests.max_model_len,
            slots=self.slots,
            settings=self.slot_settings,
            emits=Emits(last=self.settling.spares_last_commit, others=joins_commits),
            keeps_emitted=not joins_commits,
        )
        store_soft_embeds(soft_rows, settled, batch, self.slots)
        return _PlainStep(settled, logits, row_temperature, stats.best_guess)

    def _fused_draws(self, batch: CanvasBatch, block_ends: torch.Tensor) -> "StepDraws":
        """Returns temperature and noise of each canvas, computed in one kernel."""
        from vllm_dllm.denoise.draws_triton import temperature_and_noise  # needs Triton

        numbers = self.slots.columns
        return temperature_and_noise(
            batch.slots,
            block_ends,
            batch.lengths,
            (numbers.noise_key, numbers.steps_done, numbers.num_steps),
            self.slot_settings.schedule,
            self.canvas_length,
            self.vocab_size,
        )

    def _denoise(self, inputs: StepInputs, source: torch.Tensor) -> Denoised:
        """Draws candidates, keeps to grammars, and decides which positions are accepted."""
        batch, numbers, settings = inputs.batch, inputs.numbers, inputs.settings
        last_guess = inputs.tokens.best_guess
        assert isinstance(settings, StepSettings)
        # Revealed tokens are the last best guesses; the canvas may hold a pin there.
        reveal = kept = None
        if settings.reveal is not None:
            reveal = Reveal(*settings.reveal, self.slots.revealed[batch.slot_index], last_guess)
            kept = torch.where(reveal.kept, reveal.tokens, NO_TOKEN)
        logits = self._wrap_logits(source, RuleContext(batch, inputs.starts, last_guess, kept))
        step_temperature, drawn = self._draw_noise(inputs, settings)
        row_temperature = batch.expand_to_rows(step_temperature)[:, None]
        legal, grammars = None, self.requests.grammars
        if grammars.any_in(batch):
            legal = grammars.find_legal_paths(
                batch,
                inputs.starts,
                inputs.skips_grammars,
                numbers.steps_done,
                logits,
                row_temperature,
                revealing=reveal,
            )
        by_row, soft_rows = logits.read(row_temperature, batch.flatten(drawn.candidate))
        stats = RowStats(*(batch.unflatten(column) for column in by_row))
        if legal is not None:
            stats = legal.apply(stats)
        if settings.is_greedy is not None:
            greedy = torch.where(settings.is_greedy[:, None], stats.best_guess, stats.candidate)
            stats = stats._replace(candidate=greedy)
        answer_only = None
        if settings.judges_answer_only is not None:
            answer_only = AnswerOnly(settings.judges_answer_only, inputs.stops)
        outcome = denoise_step(
            stats,
            batch.valid,
            CanvasState(last_guess, numbers.times_repeated, numbers.steps_done, numbers.num_steps),
            drawn.renoise,
            settings.rules,
            revealing=reveal,
            answer_only=answer_only,
            constrained=None if legal is None else legal.constrained,
        )
        next_canvas = drawn.next_canvas
        return Denoised(
            logits=logits,
            temperature=step_temperature,
            row_temperature=row_temperature,
            stats=stats,
            soft_rows=soft_rows,
            next_canvas=next_canvas if legal is None else legal.force_starts(next_canvas),
            outcome=outcome,
            revealed=None if settings.reveal is None else outcome.accepted,
        )

    def _draw_noise(
        self, inputs: StepInputs, settings: StepSettings
    ) -> tuple[torch.Tensor, StepNoise]:
        """Returns the temperature [n] fp32 and the noise of each canvas."""
        if self.fuses:
            of_step = self._fused_draws(inputs.batch, inputs.block_ends)
            return of_step.temperature[:, 0], of_step.noise
        numbers = inputs.numbers
        drawn = step_noise(
            numbers.noise_key,
            inputs.starts,
            inputs.batch.lengths,
            steps=numbers.steps_done,
            canvas_length=self.canvas_length,
            vocab_size=self.vocab_size,
        )
        return (
            temperature(numbers.steps_done, numbers.num_steps, settings.t_min, settings.t_span),
            drawn,
        )

    def _wrap_logits(
        self,
        source: torch.Tensor,  # see `advance`
        context: RuleContext,
    ) -> CanvasLogits:
        """Returns the canvases' logits: whole, or streamed by tiles if the model does that."""
        kind = StreamedLogits if self.model.streams_vocabulary else WholeLogits
        return kind(source, context, self.logit_tools)
