"""Admits requests to a made-up server."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.config.extension import RequestLimits
from vllm_dllm.requests.admission import ServedModel, admit
from vllm_dllm.requests.options import RequestOptions, load_options, server_defaults

C, V = 64, 512
SDAR, NEMOTRON = FAMILIES["SDARForCausalLM"], FAMILIES["NemotronLabsDiffusionModel"]


class OfCharacters:
    """A tokenizer whose tokens are characters."""

    max_chars_per_token = 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]


TOKENIZER = OfCharacters()


def served(**changes: Any) -> ServedModel:
    family = changes.pop("family", None)
    defaults = server_defaults(changes.pop("defaults", {}), family)
    values = {
        "config": SimpleNamespace(kv_transfer_config=None),
        "tokenizer": TOKENIZER,
        "limits": RequestLimits(),
        "blocks_in_flight": 8,
    } | changes
    return ServedModel(canvas_length=C, vocab_size=V, family=family, defaults=defaults, **values)


def admitted(
    params: SamplingParams, to: ServedModel | None = None, prompt: int = 9
) -> SamplingParams:
    """The parameters of vLLM's request, as its engine gets them."""

    def resolve(params: SamplingParams) -> Any:
        own = params.clone()
        own.update_from_generation_config({}, eos_token_id=1)
        if own.bad_words:
            own._bad_words_token_ids = [[ord(c) for c in word] for word in own.bad_words]
        return SimpleNamespace(sampling_params=own, prompt_token_ids=[5] * prompt)

    own = admit(params, to or served(), resolve).sampling_params
    return msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=SamplingParams)


def options(given: dict[str, Any], to: ServedModel | None = None, **params: Any) -> RequestOptions:
    found = load_options(admitted(SamplingParams(extra_args=given, **params), to))
    assert found is not None
    return found


def refusal(
    given: dict[str, Any], to: ServedModel | None = None, **params: Any
) -> VLLMValidationError:
    with pytest.raises(VLLMValidationError) as refused:
        options(given, to, **params)
    return refused.value
