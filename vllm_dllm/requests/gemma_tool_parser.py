"""`--tool-call-parser gemma4_strict`: Gemma 4's calls, with arguments that always fit their schema.

vLLM's own `gemma4` reads what the model happens to write. This one asks for a grammar besides: free
text until a call begins, from there on only what the functions' schemas allow.
"""

import json
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.parser.abstract_parser import structured_outputs_to_format
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers.abstract_tool_parser import Tool, ToolParser
from vllm.tool_parsers.utils import get_function_tools

from vllm_dllm.grammar.gemma_calls import CALL, END, QUOTE
from vllm_dllm.grammar.gemma_reading import Call, MalformedError, overlap, read_calls

logger = init_logger(__name__)


class GemmaToolParser(ToolParser):
    supports_required_and_named = False  # in vLLM's JSON form
    holds_calls_to_schemas = True

    def __init__(self, tokenizer: TokenizerLike, tools: list[Tool] | None = None) -> None:
        super().__init__(tokenizer, tools)
        missing = [name for name in (CALL, END, QUOTE) if name not in self.vocab]
        if missing:
            raise RuntimeError(
                f"gemma4_strict needs a tokenizer with the tokens {CALL}, {END} and {QUOTE}, got "
                f"one without {' and '.join(missing)}. Choose another --tool-call-parser"
            )
        self._sent_text = 0  # characters
        self._sent_arguments: list[int] = []  # characters, of each call so far

    def adjust_request(self, request: Any) -> Any:
        """Of a chat or a response: holds its answer to the form of calls."""
        if not request.tools or request.tool_choice == "none":
            return request
        request.skip_special_tokens = False
        calls = wanted_calls(request)
        if calls is None:
            return request
        form: dict[str, Any] = calls
        others = request.extract_structured_outputs()
        if others is not None and calls["at_least_one"]:
            logger.warning_once("structured outputs are left out where a call must come.")
        elif others is not None:
            other = structured_outputs_to_format(others)
            assert other is not None, "a form was asked for"
            form = {
                "type": "or",
                "elements": [{**calls, "at_least_one": True}, other.model_dump()],
            }
        tag = StructuredOutputsParams(structural_tag=json.dumps({"format": form}))
        request.structured_outputs = tag
        if hasattr(request, "response_format"):
            request.response_format = None
        else:
            request.text = None
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        try:
            around, calls = read_calls(model_output)
        except MalformedError as error:
            logger.warning("A call is left as text: %s.", error)
            around, calls = model_output, []
        found = [
            ToolCall(function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in calls
            if call.is_complete
        ]
        if len(found) < len(calls) and not found:
            around = model_output  # all there is, of an answer that was cut
        return ExtractedToolCallInformation(
            tools_called=bool(found), tool_calls=found, content=around or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        try:
            around, calls = read_calls(current_text)
        except MalformedError as error:
            logger.warning_once("A call that cannot be read is left out: %s.", error)
            return None
        if list(current_token_ids).count(self.vocab[CALL]) > current_text.count(CALL):
            # The text lags behind the tokens where stop strings are looked for.
            around = around[: len(around) - overlap(around, CALL)]
        text, self._sent_text = around[self._sent_text :], max(self._sent_text, len(around))
        changes = [change for i, call in enumerate(calls) for change in self._changes(i, call)]
        if not text and not changes:
            return None
        return DeltaMessage(content=text or None, tool_calls=changes)

    def _changes(self, i: int, call: Call) -> list[DeltaToolCall]:
        """What is new of the i-th call."""
        if i == len(self._sent_arguments):
            self._sent_arguments.append(len(call.arguments))
            function = DeltaFunctionCall(name=call.name, arguments=call.arguments)
            call_id = make_tool_call_id()
            return [DeltaToolCall(index=i, id=call_id, type="function", function=function)]
        more = call.arguments[self._sent_arguments[i] :]
        self._sent_arguments[i] += len(more)
        function = DeltaFunctionCall(arguments=more)
        return [DeltaToolCall(index=i, function=function)] if more else []


def wanted_calls(request: Any) -> dict[str, Any] | None:
    """Which calls a chat or a response may have, as a format of structural tags
    (`structural_tag.py`); None: none at all.

    Raises:
        VLLMValidationError: there is no function of that name.
    """
    functions = {}
    for tool in get_function_tools(request.tools):
        function = getattr(tool, "function", tool)
        functions[function.name] = function.parameters or {"type": "object", "properties": {}}
    choice = request.tool_choice
    names, must_come, is_single = _choice(choice, functions)
    if unknown := [name for name in names if name not in functions]:  # of allowed_tools
        raise VLLMValidationError(
            f"tool_choice must name one of the tools {sorted(functions)}, got {unknown[0]!r}.",
            parameter="tool_choice",
        )
    if not names:
        return None
    return {
        "type": "gemma4_calls",
        "functions": [{"name": name, "parameters": functions[name]} for name in names],
        "at_least_one": must_come,
        "stop_after_first": is_single or request.parallel_tool_calls is False,
    }


def _choice(choice: Any, functions: dict[str, Any]) -> tuple[list[str], bool, bool]:
    """The functions that may be called, whether one must be, and whether only once."""
    if choice in (None, "auto", "required"):
        return list(functions), choice == "required", False
    if choice.type == "allowed_tools":
        names = [tool.get("name", "") for tool in choice.tools]
        return names, choice.mode == "required", False
    return [getattr(choice, "function", choice).name], True, True
