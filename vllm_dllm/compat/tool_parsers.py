"""vLLM's register of tool parsers, by the names of `--tool-call-parser`."""

from vllm_dllm.compat.patching import is_server


def register_tool_parser(name: str, module: str, class_name: str) -> None:
    """Loaded when a server asks for it. Nothing in a process that is no server: what vLLM imports
    for its register takes a second. Repeatable."""
    if is_server():
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.register_lazy_module(name, module, class_name)
