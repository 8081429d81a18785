"""vLLM's registers of parsers, by the names of `--tool-call-parser` and `--reasoning-parser`."""

from vllm_dllm.compat.patching import is_server

Parser = tuple[str, str, str]
"""Its name in the register, its module and its class."""


def register_parsers(tool_parser: Parser, reasoning_parser: Parser) -> None:
    """Loaded when a server asks for them. Nothing in a process that is no server: what vLLM imports
    for its registers takes a second. Repeatable."""
    if is_server():
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.register_lazy_module(*tool_parser)
        ReasoningParserManager.register_lazy_module(*reasoning_parser)
