"""Admits requests to the engine: checks the parameters and `diffusion_*` keys of each request, and
makes its `RequestOptions`. All requests come this way."""

import copy
import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

from vllm_dllm.compat.admission import KEYS_OF_VLLM
from vllm_dllm.config.architectures import Family, family_of
from vllm_dllm.config.canvas_feeds import FEED, PLUGIN, PLUGINS_VARIABLE
from vllm_dllm.config.extension import ExtensionConfig, RequestLimits
from vllm_dllm.config.masked import check_asked_blocks, check_verified
from vllm_dllm.requests import limits
from vllm_dllm.requests.options import (
    PREFIX,
    STEP_KEYS,
    STREAM_CANVASES,
    RequestOptions,
    parse_keys,
    server_defaults,
)
from vllm_dllm.requests.prediction import encode_prediction
from vllm_dllm.requests.structured_outputs import check_structured_outputs

logger = init_logger(__name__)

Resolve = Callable[[SamplingParams], Any]
"""vLLM's own part of the admission. It checks the parameters and returns vLLM's request. That has a
copy of the parameters, with stop tokens, and with bad words as tokens."""
_NOT_VERIFIED = STEP_KEYS - {f"{PREFIX}{name}" for name in ("acceptance", "logprobs")}
"""Keys that have no use with diffusion_acceptance "verified"."""


@dataclass(frozen=True)
class ServedModel:
    """What a server offers: the model and the settings that requests are checked against."""

    config: VllmConfig
    tokenizer: Any  # None: --skip-tokenizer-init
    canvas_length: int
    vocab_size: int
    family: Family | None  # of a masked model; None: DiffusionGemma
    blocks_in_flight: int  # the most blocks that a masked model denoises at once for a request
    defaults: Mapping[str, Any]  # field of `RequestOptions` -> value where a request has no key
    limits: RequestLimits | None  # None: offline, where nobody waits for others

    @classmethod
    def from_config(cls, config: VllmConfig, tokenizer: Any, *, to_many: bool) -> "ServedModel":
        """Reads vLLM's configuration of a diffusion model. `to_many` is True for a server whose
        clients wait for each other: its limits apply. Offline it is False."""
        assert config.diffusion_config is not None, "vLLM makes it for diffusion architectures"
        extension = ExtensionConfig.from_additional_config(config.additional_config)
        family = family_of(config.model_config.architecture, config.model_config.hf_config)
        return cls(
            config=config,
            tokenizer=tokenizer,
            canvas_length=config.diffusion_config.canvas_length,
            vocab_size=config.model_config.get_vocab_size(),
            family=family,
            blocks_in_flight=extension.blocks_in_flight,
            defaults=server_defaults(extension.defaults, family),
            limits=extension.limits if to_many else None,
        )


def admit(params: SamplingParams, served: ServedModel, resolve: Resolve) -> Any:
    """Checks a request for a diffusion model, and returns vLLM's request. Its parameters are a copy
    of `params` with the request's `RequestOptions` in `extra_args`. Raises VLLMValidationError,
    which becomes HTTP 400; it names the key or the parameter, what was expected and what came."""
    options = _read_options(params, served)
    if served.limits is not None:
        limits.check_request_limits(served.limits, params, options)
        limits.check_repetition_detection(params)
        limits.check_prediction_text(served.limits, options, served.tokenizer)
    if served.family is not None and not served.family.is_causal:
        for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
            if getattr(params, name) is not None:
                raise limits.refusal(
                    f"{name} is not possible with a masked model: a row of the prompt has seen its "
                    f"own token and those of its block. Leave it out."
                )
    if options.read_only:
        _check_answers_are_not_stored(served.config)
        params = _limit_to_one_canvas(params, options.canvas_length or served.canvas_length)
    request = resolve(params)  # refuses budgets without a reasoning parser
    if params.thinking_token_budget is not None:
        # Not refused: Anthropic's clients that ask for thinking cannot leave it out.
        logger.warning_once("thinking_token_budget is ignored by diffusion models.")
    limits.check_prompt(request.prompt_token_ids or (), served.vocab_size)
    resolved = request.sampling_params
    limits.check_numbers(resolved)
    limits.check_logprobs(resolved, served.vocab_size)
    limits.check_allowed_tokens(resolved, is_constrained=options.constrained)
    limits.check_first_token(resolved, served.vocab_size)
    if resolved.structured_outputs is not None:
        check_structured_outputs(
            resolved,
            served.config.structured_outputs_config,
            served.tokenizer,
            served.vocab_size,
            served.config.model_config.max_model_len,
            is_constrained=options.constrained,
        )
    options = _complete_options(options, served.tokenizer)
    if served.limits is not None:
        num_tokens = len(request.prompt_token_ids or ())
        limits.check_token_limits(served.limits, resolved, options, num_tokens, served.vocab_size)
    options.store_in(resolved)
    return request


def admit_target(
    params: SamplingParams, vocab_size: int, resolve: Resolve, *, to_many: bool
) -> Any:
    """Checks a request for a target with a drafter, and returns vLLM's request. vLLM's sampler
    serves it, so it has no `RequestOptions`. `to_many`: as in `ServedModel.from_config`. Raises
    VLLMValidationError, which becomes HTTP 400, for a parameter that the sampler cannot serve."""
    request = resolve(params)
    limits.check_numbers(request.sampling_params)
    limits.check_logprobs(request.sampling_params, vocab_size)
    limits.check_allowed_tokens(request.sampling_params)
    limits.check_sampler_limits(request.sampling_params)
    if to_many:
        limits.check_repetition_detection(request.sampling_params)
    limits.check_embeddings(request.prompt_embeds)
    wanted = request.sampling_params.structured_outputs
    if wanted is not None and isinstance(wanted.json, dict):
        # As text, whose integers may be of any size, as in `check_structured_outputs`.
        request.sampling_params.structured_outputs = own = copy.copy(wanted)
        own.json = json.dumps(wanted.json)
    return request


def _read_options(params: SamplingParams, served: ServedModel) -> RequestOptions:
    """Returns the options that the keys in `params.extra_args` ask for. Raises VLLMValidationError
    for a key that is unknown, or contradicts the server, the parameters or another key."""
    extra = params.extra_args or {}
    given = {str(key): value for key, value in extra.items() if key not in KEYS_OF_VLLM}
    feed = given.pop(FEED, None)
    try:
        options = parse_keys(given, served.defaults, served.family)
        _check_mode(options, given)
        _check_canvas(options, served)
        _check_companions(options, params, served.tokenizer)
    except ValueError as error:
        raise limits.refusal(str(error)) from error
    return replace(options, canvas_feed=feed) if isinstance(feed, str) else options


def _complete_options(options: RequestOptions, tokenizer: Any) -> RequestOptions:
    """Returns the options with values that follow from others."""
    changes: dict[str, Any] = {"http_request": limits.http_request_name()}
    if options.mode == "autoregressive":
        changes["canvas_length"] = 1  # the token that is known
    if isinstance(options.prediction, str):
        changes["prediction"] = encode_prediction(options.prediction, tokenizer)
    return replace(options, **changes)


def _check_mode(options: RequestOptions, given: Mapping[str, Any]) -> None:
    """Raises ValueError if the request has a key that its mode or acceptance has no use for."""
    if options.is_verified and (useless := STEP_KEYS & given.keys()):
        key = min(useless)
        raise ValueError(
            f"{key} is about what steps of diffusion reveal, got {given[key]!r} with "
            f"diffusion_mode {options.mode!r}. Leave it out, or ask for diffusion_mode 'diffusion'."
        )
    if options.acceptance == "verified" and (useless := _NOT_VERIFIED & given.keys()):
        key = min(useless)
        raise ValueError(
            f"{key} is not for diffusion_acceptance 'verified', which reveals what the model "
            f"verifies, got {given[key]!r}. Leave it out."
        )


def _check_canvas(options: RequestOptions, served: ServedModel) -> None:
    """Raises ValueError for options that contradict the canvas, the vocabulary or each other."""
    length, vocab_size = served.canvas_length, served.vocab_size
    width = options.canvas_length or length
    if width > length:
        raise ValueError(
            f"diffusion_canvas_length must be at most {length}, the served canvas, got {width}."
        )
    ids = f"token ids from 0 to {vocab_size - 1}"
    for name in ("seed_canvas", "prediction"):
        tokens = getattr(options, name)
        if wrong := isinstance(tokens, list) and [t for t in tokens if not 0 <= t < vocab_size]:
            raise ValueError(f"{PREFIX}{name} must have {ids}, got {reprlib.repr(wrong)} in it.")
    if options.seed_canvas is not None and len(options.seed_canvas) != width:
        raise ValueError(
            f"diffusion_seed_canvas must be {width} {ids}, one for each position of the canvas, "
            f"got {len(options.seed_canvas)}."
        )
    if options.pinned and options.seed_canvas is None:
        raise ValueError(
            "diffusion_pinned needs a diffusion_seed_canvas, whose tokens it keeps, got none."
        )
    if outside := [place for place in options.pinned if not 0 <= place < width]:
        raise ValueError(
            f"diffusion_pinned must be positions of the canvas, from 0 to {width - 1}, got "
            f"{reprlib.repr(outside)} in it."
        )
    check_asked_blocks(options.blocks_in_flight, served.blocks_in_flight)
    check_verified(options.acceptance, served.family, served.blocks_in_flight)


def _check_companions(options: RequestOptions, params: SamplingParams, tokenizer: Any) -> None:
    """Raises ValueError for options that need a parameter or a part of the server that is missing,
    or that contradict a parameter."""
    if options.constrained and not params.logprob_token_ids:
        raise ValueError(
            "diffusion_constrained needs logprob_token_ids, which are what it chooses among, got "
            "none."
        )
    if options.constrained and params.allowed_token_ids:
        raise ValueError(
            "diffusion_constrained chooses among logprob_token_ids alone, and got "
            "allowed_token_ids as well. Leave one of them out."
        )
    if options.logprobs is not None:
        if params.logprobs is None and not params.logprob_token_ids:
            raise ValueError(
                "diffusion_logprobs needs logprobs, of which it says when they are taken, got none."
            )
        if params.flat_logprobs:
            raise ValueError(
                "diffusion_logprobs is not for flat_logprobs, which have no place for steps. Leave "
                "one out."
            )
    if options.stream_canvases:
        raise ValueError(
            f"{STREAM_CANVASES} is for streams of /v1/completions and /v1/chat/completions, on "
            f"a server that was started with {PLUGINS_VARIABLE}={PLUGIN} in its "
            f"environment. Leave it out elsewhere."
        )
    for name in ("stop", "bad_words"):
        if tokenizer is None and (value := getattr(params, name)):
            raise ValueError(
                f"{name} needs a tokenizer, which --skip-tokenizer-init leaves out, got {value!r}. "
                f"Leave it out, or use tokens: stop_token_ids, or logit_bias of -100."
            )
    if isinstance(options.prediction, str) and tokenizer is None:
        raise ValueError(
            "diffusion_prediction must be a list of token ids on this server, got a text: it was "
            "started with --skip-tokenizer-init."
        )


def _check_answers_are_not_stored(config: VllmConfig) -> None:
    """Raises VLLMValidationError if vLLM's offloading connector stores what it has of answers, too:
    of a read-only request that is a denoise step's."""
    transfer = config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    inner = [each.get("kv_connector_extra_config") or {} for each in extra.get("connectors", ())]
    if all(each.get("offload_prompt_only", True) for each in (extra, *inner)):
        return
    raise limits.refusal(
        "diffusion_read_only is not possible on this server, which was started with "
        '"offload_prompt_only": false: keys and values of a canvas that is never committed would '
        "be stored for later requests. Leave it out."
    )


def _limit_to_one_canvas(params: SamplingParams, width: int) -> SamplingParams:
    """Returns a copy of the parameters of a read-only request: its answer is at most one canvas of
    `width` tokens, and EOS does not end it, since EOS may be anywhere in the canvas. Raises
    VLLMValidationError if min_tokens are more than that."""
    most = min(params.max_tokens or width, width)
    if params.min_tokens > most:  # which the engine would fail to decode
        raise limits.refusal(
            f"min_tokens must be at most {most}, the canvas of this request with "
            f"diffusion_read_only, got {params.min_tokens}. Lower it or leave it out."
        )
    own = params.clone()
    own.max_tokens, own.ignore_eos = most, True
    return own
