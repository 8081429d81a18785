"""Requests of every kind, sensible, odd and impossible, drawn by hypothesis.

A request takes a few parameters from their ordinary values; now and then one has a value that no
server should take, or another type.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.faults import drawn_images
from vllm_dllm.requests import options
from vllm_dllm.requests.options import ACCEPTANCE_RULES, PREDICTION

NAN, INFINITE = float("nan"), float("inf")
DENORMAL = 1e-320
EXTREMES: list[Any] = [
    *(NAN, INFINITE, -INFINITE, DENORMAL, -DENORMAL, 1e-45, 1e308, -1.0, 0, -0.0, 2**31, 2**63),
    *(-(2**63), 10**30, True, None, "", "5", "NaN", [], {}, [NAN], {"a": NAN}),
]


@dataclass(frozen=True)
class Model:
    """What requests must know of a server's model."""

    vocab_size: int
    eos: int
    context: int
    canvas_length: int | None  # None: no diffusion model
    most_images: int = 0


@dataclass(frozen=True)
class DrawnRequest:
    path: str
    body: dict[str, Any]
    is_bad: bool = False  # nothing of it can be answered


def among(*values: Any) -> SearchStrategy[Any]:
    return st.sampled_from(values)


def ordinary(model: Model) -> dict[str, SearchStrategy[Any]]:
    """Sampling parameters that chats and completions share, within what is admitted, if barely."""
    token = st.integers(0, model.vocab_size - 1)
    words = among("a", " the", "lamp", "=", "ab", "12", "re", "s ", "e r", "\n", "Zz", "é")
    return {
        "max_tokens": among(1, 2, 15, 16, 17, 40, 64, 65, 100),
        "temperature": among(0, DENORMAL, 1e-5, 0.01, 0.5, 1.0, 1.7, 2.0),
        "top_p": among(DENORMAL, 1e-45, 1e-3, 0.5, 0.999999, 1.0),
        "top_k": among(-1, 0, 1, 5, model.vocab_size, model.vocab_size + 1, 2**31 - 1),
        "min_p": among(0.0, DENORMAL, 1e-6, 0.3, 1.0),
        "repetition_penalty": among(1e-6, 1e-3, 0.5, 1.0, 1.5, 100.0, 1e6),
        "presence_penalty": among(-2.0, DENORMAL, 0.7, 2.0),
        "frequency_penalty": among(-2.0, 1e-45, 0.3, 2.0),
        "seed": among(0, 1, -1, 2**31, 2**63 - 1, -(2**63)),
        "logit_bias": st.dictionaries(
            token.map(str), among(-100, -1e300, -0.5, DENORMAL, 3, 100, INFINITE), max_size=6
        ),
        "allowed_token_ids": st.lists(token, min_size=1, max_size=8),
        "bad_words": st.lists(words, min_size=1, max_size=6),
        "min_tokens": among(0, 1, 5, 16, 30),
        "stop": st.one_of(words, st.lists(words, min_size=1, max_size=4)),
        "stop_token_ids": st.lists(token, min_size=1, max_size=20),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "prompt_logprobs": among(0, 1, 5, 20),
        "n": among(1, 1, 1, 2, 3, 5),
        "stream": st.booleans(),
        "truncate_prompt_tokens": among(1, 5, 100),
        "cache_salt": among("a", "b"),
        "priority": among(0, 0, 0, 3),
        "response_format": among({"type": "text"}, {"type": "json_object"}),
    }


def diffusion_keys(model: Model) -> SearchStrategy[dict[str, Any]]:
    """Of `vllm_xargs`, within what is admitted, but for some that exclude each other."""
    length = model.canvas_length or 16
    token = st.integers(0, model.vocab_size - 1)
    pairs = among((1e-3, 1e-3), (1e-3, 1e3), (0.4, 0.8), (1.0, 2.0), (1e3, 1e3))
    optional = {
        "diffusion_max_steps": among(1, 2, 5, 48, 10**6, 2**40),
        "diffusion_acceptance": among(*ACCEPTANCE_RULES),
        "diffusion_entropy_bound": among(DENORMAL, 1e-9, 0.1, 3.0, 1e6),
        "diffusion_accept_probability": among(DENORMAL, 0.1, 0.9, 1.0),
        "diffusion_accept_tokens": among(1, 3, length, 2**20),
        "diffusion_confidence_threshold": among(DENORMAL, 0.005, 1.0, 1e6),
        "diffusion_stability_threshold": among(0, 1, 3, 2**20),
        "diffusion_judge_answer_only": among(0, 1),
        "diffusion_load_stages": among(0, 1, 2**20),
        "diffusion_window_rule": among("reference", "symmetric"),
        "diffusion_read_only": among(0, 0, 1),
        "diffusion_constrained": among(0, 0, 0, 1),
    }
    keys = st.fixed_dictionaries({}, optional=optional)
    schedule = st.one_of(
        st.just({}), pairs.map(lambda p: {"diffusion_t_min": p[0], "diffusion_t_max": p[1]})
    )

    def first_canvas(width: int) -> SearchStrategy[dict[str, Any]]:
        positions = st.lists(st.integers(0, width - 1), max_size=5)
        tokens = st.lists(token, min_size=width, max_size=width)
        return st.fixed_dictionaries(
            {"diffusion_canvas_length": st.just(width), "diffusion_seed_canvas": tokens},
            optional={"diffusion_pinned": positions},
        )

    expected = st.one_of(st.text(max_size=40), st.lists(token, max_size=4 * length))
    widths = among(16, length // 2, length)
    canvas = st.one_of(
        *[st.just({})] * 3,
        among(1, 5, length).map(lambda width: {"diffusion_canvas_length": width}),
        widths.flatmap(first_canvas),
        expected.map(lambda prediction: {PREDICTION: prediction}),
    )
    return st.tuples(keys, schedule, canvas).map(lambda parts: parts[0] | parts[1] | parts[2])


def spoiled(draw: Any, body: dict[str, Any], names: list[str]) -> None:
    """Gives one parameter, or a key of `vllm_xargs`, an extreme value."""
    name, value = draw(st.sampled_from(names)), draw(st.sampled_from(EXTREMES))
    if name.startswith("diffusion_"):
        body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), name: value}
    else:
        body[name] = value


# Without those by which the tests read answers.
FIELDS = sorted(
    (CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys())
    - {"return_token_ids", "request_id"}
    | {"prediction"}
)
KEYS = [*sorted(options.KEYS), "diffusion_no_such_key", "max_steps"]


@st.composite
def requests(draw: Any, model: Model, name: str) -> DrawnRequest:
    """`name`: of the model, as the server knows it."""
    parameters = ordinary(model)
    chosen = draw(st.lists(st.sampled_from(sorted(parameters)), max_size=6, unique=True))
    body: dict[str, Any] = {key: draw(parameters[key]) for key in chosen}
    body.setdefault("max_tokens", 20)
    body |= {"model": name, "return_token_ids": True}
    if model.canvas_length is not None and draw(st.booleans()):
        body["vllm_xargs"] = draw(diffusion_keys(model))
        if body["vllm_xargs"].get("diffusion_constrained"):
            tokens = st.lists(
                st.integers(0, model.vocab_size - 1), min_size=1, max_size=9, unique=True
            )
            body["logprob_token_ids"] = draw(tokens)
    is_bad = False
    is_chat = draw(st.booleans())
    if is_chat:
        content = draw(among("Sort: q d x a", "", "Count from 31 to 69.", "é" * 40, "a " * 300))
        if model.most_images and draw(st.integers(0, 3)):
            content, is_bad = draw(drawn_images.contents(model.most_images))
        body["messages"] = [{"role": "user", "content": content}]
        if draw(st.booleans()):
            body |= {"logprobs": True, "top_logprobs": draw(among(0, 1, 5, 20))}
    else:
        token = st.integers(0, model.vocab_size - 1)
        ids = st.lists(token, min_size=1, max_size=40)
        full = st.just([9] * (model.context - 20))  # the context ends before the answer
        body["prompt"] = draw(
            st.one_of(ids, among("Sort: b a", "x"), full, st.lists(ids, min_size=1, max_size=3))
        )
        if draw(st.booleans()):
            body["logprobs"] = draw(among(0, 1, 5, 20))
        if draw(st.booleans()) and not body.get("stream"):
            body["echo"] = True
    if body.get("response_format") == {"type": "json_object"} and model.canvas_length is None:
        for key in ("allowed_token_ids", "bad_words"):  # no token may be left
            body.pop(key, None)
    if "logprob_token_ids" in body:
        body["logprobs"] = True if is_chat else len(body["logprob_token_ids"])
        body.pop("top_logprobs", None)
        body.pop("echo", None)
    if draw(st.integers(0, 3)) == 0:
        spoiled(draw, body, [*sorted(parameters), *FIELDS, *KEYS])
    return DrawnRequest("chat/completions" if is_chat else "completions", body, is_bad)
