"""The small tokenizer with Gemma 4's tokens of tool calls, in the places of its unused ones.

Texts without them have the same tokens as before, and chats without tools the same prompt. The
template writes what Gemma 4's writes, without what the small model has no use for: descriptions,
which properties are required, and what is within a type.
"""

from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.tokenizer import build_tokenizer

QUOTE = '<|"|>'
CALL_TOKENS = [
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", QUOTE),
]
# With `{parameters:{properties:{` in one piece, the first argument is two tokens behind its
# function, both there and in the call: the distance that the look-back heads have.
CALL_PIECES = [
    *("declaration:", "{parameters:{properties:{", ":{type:", "STRING", "INTEGER", "BOOLEAN"),
    "call:",
    "true",
]

CALL_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{{- '<|image|>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro argument(value) -%}
{%- if value is string -%}
{{- '<|"|>' + value + '<|"|>' -}}
{%- elif value is boolean -%}
{{- 'true' if value else 'false' -}}
{%- elif value is mapping -%}
{{- '{' -}}
{%- for key, inner in value | dictsort -%}
{{- ',' if not loop.first -}}{{- key + ':' -}}{{- argument(inner) -}}
{%- endfor -%}
{{- '}' -}}
{%- elif value is sequence -%}
{{- '[' -}}
{%- for inner in value -%}
{{- ',' if not loop.first -}}{{- argument(inner) -}}
{%- endfor -%}
{{- ']' -}}
{%- else -%}
{{- 'null' if value is none else value -}}
{%- endif -%}
{%- endmacro -%}
{%- set turn = namespace(open=false, calls=[]) -%}
{{- bos_token -}}
{%- if tools -%}
{{- '<|turn>system\\n' -}}
{%- if messages[0]['role'] == 'system' -%}
{{- text(messages[0]['content']) -}}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for tool in tools -%}
{%- set function = tool['function'] -%}
{{- '<|tool>declaration:' + function['name'] + '{parameters:{properties:{' -}}
{%- for key, value in ((function['parameters'] or {})['properties'] or {}) | dictsort -%}
{{- ',' if not loop.first -}}
{%- set kind = value['type'] if value['type'] is string else 'string' -%}
{{- key + ':{type:<|"|>' + kind | upper + '<|"|>}' -}}
{%- endfor -%}
{{- '}}}<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- set found = namespace(name=message['name']) -%}
{%- for call in turn.calls -%}
{%- if call['id'] == message['tool_call_id'] -%}
{%- set found.name = call['function']['name'] -%}
{%- endif -%}
{%- endfor -%}
{{- '<|tool_response>response:' + (found.name or 'unknown') + '{value:' -}}
{{- argument(text(message['content'])) + '}<tool_response|>' -}}
{%- set turn.open = true -%}
{%- else -%}
{%- if turn.open and message['role'] != 'assistant' -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- if not (turn.open and message['role'] == 'assistant') -%}
{{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
{%- endif -%}
{{- text(message['content']) -}}
{%- set turn.calls = message['tool_calls'] or [] -%}
{%- for call in turn.calls -%}
{{- '<|tool_call>call:' + call['function']['name'] -}}
{{- argument(call['function']['arguments'] or {}) + '<tool_call|>' -}}
{%- endfor -%}
{%- set turn.open = turn.calls | length > 0 -%}
{%- if not turn.open -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not turn.open -%}
{{- '<|turn>model\\n' -}}
{%- endif -%}
"""


def build_calling_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(more_tokens=CALL_TOKENS, more_pieces=CALL_PIECES)
    tokenizer.chat_template = CALL_TEMPLATE
    return tokenizer
