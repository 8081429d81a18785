"""Requests to call one of a few functions, and what is to be said, with exactly checkable answers.

    python -m checkpoints.recipes.calls.tasks > checkpoints/held_out_tools.jsonl

A request names a function, and names and values of its arguments: "Please lamp age 3, city 'Rome'."
Token by token it is as long as its call, and no longer than what a sliding layer sees of it, so a
call's tokens come from places that are all as far away. Some requests do not name the first
argument, "Please lamp with 3, city 'Rome'.", which then stands in the function's declaration alone.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpoints.recipes.calls.tokenizer import QUOTE
from checkpoints.recipes.tasks import HELD_OUT_SHARE, Example, chat
from checkpoints.recipes.words import CAPITALS, NAMES, NOUNS

STRING, INTEGER, BOOLEAN, ARRAY = "string", "integer", "boolean", "array"
KIND_SHARES = {STRING: 0.35, INTEGER: 0.3, BOOLEAN: 0.15, ARRAY: 0.2}
ARGUMENT_NAMES = [*NOUNS, "age", "city", "color", "day", "name", "number", "size", "value"]
VALUES = [*NOUNS, *NAMES, *CAPITALS.values()]
PREPOSITIONS = ["with", "for", "from", "in", "of", "to"]
NUM_FUNCTIONS = [2, 2, 3, 3, 4, 5, 6]  # short prompts are cheap
LONGEST_REQUEST = 26  # tokens: with the next turn's head, a window of 32

Value = str | int | bool | list[str] | list[int]
Functions = dict[str, dict[str, str]]
"""Names and kinds of the arguments, by function."""


@dataclass(frozen=True)
class CallExample(Example):
    functions: Functions
    call: tuple[str, dict[str, Value]] | None = None  # what has been called already
    result: str = ""

    @property
    def held_out(self) -> bool:
        everything = json.dumps([self.prompt, self.functions, self.result])
        return hashlib.sha256(everything.encode()).digest()[0] % HELD_OUT_SHARE == 0

    def tools(self) -> list[dict[str, Any]]:
        """Writes them as a client of OpenAI's API sends them."""
        return [tool(name, kinds) for name, kinds in self.functions.items()]

    def messages(self) -> list[dict[str, Any]]:
        """Writes them as the chat template takes them, with arguments that are no text."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.prompt}]
        if self.call is None:
            return messages
        name, arguments = self.call
        function = {"name": name, "arguments": arguments}
        call = {"id": "call_1", "type": "function", "function": function}
        return [
            *messages,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": self.result},
        ]


def tool(name: str, kinds: dict[str, str]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for argument, kind in kinds.items():
        properties[argument] = {"type": kind.removesuffix(" of integers")}
        if kind.startswith(ARRAY):
            item = INTEGER if kind.endswith("integers") else STRING
            properties[argument]["items"] = {"type": item}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _function(rng: random.Random, names: list[str], num_arguments: int) -> dict[str, str]:
    """Arguments in the order of the alphabet, as the template and the grammar have them. A call
    has one list at most."""
    kinds: list[str] = []
    while len(kinds) < num_arguments:
        kind = rng.choices(list(KIND_SHARES), list(KIND_SHARES.values()))[0]
        if kind != ARRAY:
            kinds.append(kind)
        elif not any(other.startswith(ARRAY) for other in kinds):
            kinds.append(rng.choice([ARRAY, f"{ARRAY} of integers"]))
    return dict(zip(sorted(rng.sample(names, num_arguments)), kinds, strict=True))


def _functions(rng: random.Random, most: int = 6, most_arguments: int = 3) -> Functions:
    """No function is called like an argument."""
    names = rng.sample(NOUNS, min(rng.choice(NUM_FUNCTIONS), most))
    arguments = [name for name in ARGUMENT_NAMES if name not in names]
    return {name: _function(rng, arguments, rng.randint(1, most_arguments)) for name in names}


def _value(rng: random.Random, kind: str) -> Value:
    if kind == STRING:
        return rng.choice(VALUES)
    if kind == INTEGER:
        return rng.randint(1, 99)
    if kind == BOOLEAN:
        return rng.random() < 0.5
    if kind == ARRAY:
        return rng.sample(VALUES, rng.randint(1, 2))
    return [rng.randint(1, 99) for _ in range(rng.randint(1, 3))]


def written(value: Value, quote: str, comma: str) -> str:
    if isinstance(value, list):
        return f"[{comma.join(written(item, quote, comma) for item in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def call_text(name: str, arguments: dict[str, Value]) -> str:
    pairs = [f"{key}:{written(value, QUOTE, ',')}" for key, value in arguments.items()]
    return f"<|tool_call>call:{name}{{{','.join(pairs)}}}<tool_call|>"


def request_text(rng: random.Random, name: str, arguments: dict[str, Value], named: bool) -> str:
    pairs = [(key, written(value, "'", ", ")) for key, value in arguments.items()]
    if not named:
        pairs[0] = (rng.choice(PREPOSITIONS), pairs[0][1])
    return f"Please {name} {', '.join(f'{key} {value}' for key, value in pairs)}."


def _num_tokens(value: Value) -> int:
    if isinstance(value, bool):
        return 1 if value else len("false")
    if isinstance(value, list):
        return 1 + sum(_num_tokens(item) + 1 for item in value)
    return 3 if isinstance(value, str) else len(str(value))


def _call(rng: random.Random, functions: Functions, name: str) -> tuple[str, dict[str, Value]]:
    while True:
        arguments = {key: _value(rng, kind) for key, kind in functions[name].items()}
        # "Please ", name, preposition and two blanks; a comma, a name and a blank; a full stop.
        if 4 + sum(_num_tokens(value) + 3 for value in arguments.values()) <= LONGEST_REQUEST:
            return name, arguments


def call(rng: random.Random, task: str = "call", named: bool = True) -> CallExample:
    functions = _functions(rng)
    name, arguments = _call(rng, functions, rng.choice(list(functions)))
    request = request_text(rng, name, arguments, named)
    return CallExample(task, request, call_text(name, arguments), functions)


def call_unnamed(rng: random.Random) -> CallExample:
    """What the first argument is called stands in the function's declaration alone."""
    return call(rng, "call_unnamed", named=False)


def first_arguments(rng: random.Random) -> CallExample:
    """Many such look-ups at once, from which a model learns the single one."""
    functions = _functions(rng)
    asked = rng.sample(list(functions), rng.randint(1, len(functions)))
    answer = ", ".join(f"{name}: {next(iter(functions[name]))}" for name in asked)
    return CallExample("first_arguments", f"What is {', '.join(asked)}?", answer, functions)


def call_result(rng: random.Random) -> CallExample:
    """What is said when the function has returned something."""
    functions = _functions(rng, most=3, most_arguments=2)
    name, arguments = _call(rng, functions, rng.choice(list(functions)))
    result = rng.choice([str(rng.randint(1, 99)), rng.choice(VALUES)])
    answer = f"The {name} is {result}."
    prompt = request_text(rng, name, arguments, named=True)
    return CallExample("call_result", prompt, answer, functions, (name, arguments), result)


def no_call(rng: random.Random) -> CallExample:
    """What is none of the functions' business."""
    prompt, answer = chat(rng)
    return CallExample("no_call", prompt, answer, _functions(rng, most=4, most_arguments=2))


CALL_TASKS: dict[str, Callable[[random.Random], CallExample]] = {
    "call": call,
    "call_unnamed": call_unnamed,
    "first_arguments": first_arguments,
    "call_result": call_result,
    "no_call": no_call,
}
HELD_OUT_ROWS = {"call": 200, "call_unnamed": 70, "call_result": 70, "no_call": 70}
SERVING_NOTE = (
    'This small model calls functions, when asked in these words: "Please lamp age 3, city '
    "'Rome'.\" for a function lamp with the arguments age and city, in the order of the alphabet. "
    "It knows the tasks of diffusiongemma-tiny, too. Anything else gets nonsense."
)


def generate_call(rng: random.Random, task: str, *, held_out: bool) -> CallExample:
    """A random example of `task` from the training side or the held-out side."""
    while True:
        example = CALL_TASKS[task](rng)
        if example.held_out == held_out:
            return example


def held_out_calls(seed: int = 1) -> list[CallExample]:
    rng = random.Random(seed)
    return [
        generate_call(rng, task, held_out=True)
        for task, rows in HELD_OUT_ROWS.items()
        for _ in range(rows)
    ]


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a client of OpenAI's API sends them: with arguments in JSON."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for called in message.get("tool_calls", ()):
            called["function"]["arguments"] = json.dumps(called["function"]["arguments"])
    return sent


def main() -> None:
    for example in held_out_calls():
        row = {
            "task": example.task,
            "messages": as_sent(example.messages()),
            "tools": example.tools(),
            "answer": example.answer,
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
