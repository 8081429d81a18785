"""Seams in how an API server answers and streams, and how a plugin's routes come into it."""

from scripts.seams.seam import Seam

SEAMS = [
    Seam(
        "a request's id comes from its header",
        "entrypoints.serve.engine.serving:BaseServing._base_request_id",
        'raw_request.headers.get("X-Request-Id")',
    ),
    Seam(
        "a completion's id comes from the request's",
        "entrypoints.openai.completion.serving:OpenAIServingCompletion._create_completion",
        'request_id = f"cmpl-{self._base_request_id(raw_request, request.request_id)}"',
    ),
    Seam(
        "a chat's id comes from the request's",
        "entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_completion",
        'f"chatcmpl-{self._base_request_id(raw_request, request.request_id)}"',
    ),
    Seam(
        "a completion's stream has an end",
        "entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator",
        r'yield "data: [DONE]\n\n"',
    ),
    Seam(
        "a chat's stream has an end",
        "entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
        r'yield "data: [DONE]\n\n"',
    ),
    *(
        Seam(
            f"{what} makes its usage of the results", f"entrypoints.openai.{place}", line, *versions
        )
        for what, place, line, *versions in (
            (
                "a chat",
                "chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
                "\n        usage = UsageInfo(",
            ),
            (
                "a chat's stream",
                "chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
                "final_usage = UsageInfo(",
                "0",
                "0.33",
            ),
            (
                "a chat's stream",
                "chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator_raw",
                "final_usage = UsageInfo(",
                "0.33",
            ),
            (
                "a completion",
                "completion.serving:OpenAIServingCompletion.request_output_to_completion_response",
                "\n        usage = UsageInfo(",
            ),
            (
                "a completion's stream",
                "completion.serving:OpenAIServingCompletion.completion_stream_generator",
                "final_usage_info = UsageInfo(",
            ),
        )
    ),
    Seam(
        "a call hides that its answer was cut, where it is not streamed",
        "entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
        "is_finish_reason_tool_calls = auto_tools_called or (",
        until="0.33",
    ),
    Seam(
        "what a parser of its own kind leaves of a cut call is the content",
        "parser.abstract_parser:DelegatingParser._extract_tool_calls",
        "return None, tool_call_info.content or None",
    ),
    Seam(
        "a parser is asked for the rest at the end of a stream",
        "parser.abstract_parser:DelegatingParser._flush_engine_parsers",
        'finish = getattr(parser, "finish_streaming", None)',
    ),
    Seam(
        "a prompt can leave reasoning open",
        "parser.gemma4:Gemma4Parser.adjust_initial_state_from_prompt",
        "self._engine.reset(initial_state=ParserState.REASONING)",
    ),
    Seam(
        "a plugin's layers lie inside of those that ask for the key",
        "entrypoints.launchers.app:build_app",
        """attach_endpoint_plugins(app, supported_tasks)

    init_exception_handler(app)
    init_entrypoints_middleware(args, app, supported_tasks)""",
    ),
    Seam(
        "plugins of endpoints are loaded where they are named",
        "plugins:load_endpoint_plugins",
        "if envs.VLLM_PLUGINS is None:",
    ),
]
