"""`--tool-call-parser gemma4_strict`: tool calls of Gemma 4 whose arguments fit their schema.

vLLM's own `gemma4` reads what the model happens to write. This parser also constrains the answer by
a grammar: free text until a call begins, from there on only what the functions' schemas allow.
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
from vllm.logger import init_logger
from vllm.parser.abstract_parser import structured_outputs_to_format
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers.abstract_tool_parser import Tool, ToolParser
from vllm.tool_parsers.utils import get_function_tools

from vllm_dllm.grammar.gemma_calls import CALL, END, QUOTE
from vllm_dllm.requests.gemma_reader import GemmaReader, find_markers, stop_strings
from vllm_dllm.requests.limits import refusal

logger = init_logger(__name__)


class GemmaToolParser(ToolParser):
    """Implements vLLM's interface of tool parsers for Gemma 4. Raises RuntimeError if the tokenizer
    lacks one of the tokens that mark calls."""

    supports_required_and_named = False  # if True, vLLM asks for such calls in its JSON form
    holds_calls_to_schemas = True
    # The parser also streams the text around calls, even if the request has no tools.
    engine_based_streaming = True

    def __init__(self, tokenizer: TokenizerLike, tools: list[Tool] | None = None) -> None:
        """Checks the tokenizer. The arguments are vLLM's."""
        super().__init__(tokenizer, tools)
        missing = [name for name in (CALL, END, QUOTE) if name not in self.vocab]
        if missing:
            raise RuntimeError(
                f"gemma4_strict needs a tokenizer with the tokens {CALL}, {END} and {QUOTE}, got "
                f"one without {' and '.join(missing)}. Choose another --tool-call-parser"
            )
        self._reader: GemmaReader | None = None  # of the stream; made with its first piece
        self._stops: list[str] = []
        self._num_calls = 0

    def adjust_request(self, request: Any) -> Any:
        """Constrains the answer to a chat or a response by a grammar of the calls that it may have.
        Changes `request` in place, and returns it. Does nothing for a request without tools. Raises
        VLLMValidationError if `tool_choice` names a function that is not among the tools."""
        if not request.tools or request.tool_choice == "none":
            return request
        request.skip_special_tokens = False
        calls = calls_format(request)
        if calls is None:
            return request
        form: dict[str, Any] = calls
        others = request.extract_structured_outputs()
        if others is not None and calls["at_least_one"]:
            logger.warning_once("Structured outputs are ignored where tool_choice requires a call.")
        elif others is not None:
            required = {**calls, "at_least_one": True}
            form = {"type": "or", "elements": [required, _structured_outputs_format(others)]}
        tag = StructuredOutputsParams(structural_tag=json.dumps({"format": form}))
        request.structured_outputs = tag
        if hasattr(request, "response_format"):
            request.response_format = None
        else:
            request.text = None
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Returns the calls of a whole answer, and the text around them as the content."""
        reader = self._reader_for(request)
        text, calls = reader.read_piece(model_output)
        text += reader.finish(stop_strings(request))
        tool_calls = [
            ToolCall(function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in calls
        ]
        return ExtractedToolCallInformation(
            tools_called=bool(tool_calls), tool_calls=tool_calls, content=text or None
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
        """Returns what the next piece of the stream, `delta_text`, adds; None if it adds nothing. A
        call is sent whole, because until its end it may turn out to be unfinished."""
        if self._reader is None:
            self._reader, self._stops = self._reader_for(request), stop_strings(request)
        text, calls = self._reader.read_piece(delta_text)
        if not text and not calls:
            return None
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return DeltaMessage(
            content=text or None,
            tool_calls=[
                DeltaToolCall(
                    index=index,  # counts the answer's calls from 0
                    id=make_tool_call_id(),
                    type="function",
                    function=DeltaFunctionCall(name=call.name, arguments=call.arguments),
                )
                for index, call in enumerate(calls, first)
            ],
        )

    def finish_streaming(self) -> DeltaMessage | None:
        """Returns the text that is left when the stream has ended; None if there is none."""
        rest = "" if self._reader is None else self._reader.finish(self._stops)
        return DeltaMessage(content=rest) if rest else None

    def _reader_for(self, request: Any) -> GemmaReader:
        """Returns a new reader of one answer to `request`."""
        markers = find_markers(self.model_tokenizer)
        return GemmaReader(markers, reads_calls=request.tool_choice != "none")


def _structured_outputs_format(wanted: StructuredOutputsParams) -> dict[str, Any]:
    """Returns a request's structured outputs as a format of structural tags. A grammar is passed on
    as it is: vLLM would translate it into xgrammar's dialect."""
    if wanted.grammar is not None:
        return {"type": "grammar", "grammar": wanted.grammar}
    form = structured_outputs_to_format(wanted)
    assert form is not None, "a form was asked for"
    return form.model_dump()


def calls_format(request: Any) -> dict[str, Any] | None:
    """Returns the calls that a chat or a response may have, as a format of structural tags
    (`structural_tag.py`); None if it may have no calls. Raises VLLMValidationError if `tool_choice`
    names a function that is not among the tools."""
    functions = {}
    for tool in get_function_tools(request.tools):
        function = getattr(tool, "function", tool)
        functions[function.name] = function.parameters or {"type": "object", "properties": {}}
    choice = request.tool_choice
    names, is_required, is_single = list(functions), choice == "required", False
    if choice not in (None, "auto", "required"):
        if choice.type == "allowed_tools":
            names = [tool.get("name", "") for tool in choice.tools]
            is_required = choice.mode == "required"
        else:
            names = [getattr(choice, "function", choice).name]
            is_required = is_single = True
    if unknown := [name for name in names if name not in functions]:  # of allowed_tools
        raise refusal(
            f"tool_choice must name one of the tools {sorted(functions)}, got {unknown[0]!r}."
        )
    if not names:
        return None
    return {
        "type": "gemma4_calls",
        "functions": [{"name": name, "parameters": functions[name]} for name in names],
        "at_least_one": is_required,
        "stop_after_first": is_single or request.parallel_tool_calls is False,
    }
