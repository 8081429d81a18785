"""Builds the small tokenizer: 256 bytes plus a few hundred whole words.

Every byte is a token, so any text round-trips; the words of the tasks (`words.py`) are one token
each. All pieces have the same score, so the Unigram model picks the split with the fewest tokens.
Turn markers follow Gemma 4; `<turn|>` ends a turn and is the EOS token.
"""

import math
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.words import PIECES

SPECIAL_TOKENS = ["<pad>", "<turn|>", "<bos>", "<|turn>", "<|image>", "<|image|>", "<image|>"]
PAD_ID, EOS_ID, BOS_ID, TURN_ID, BOI_ID, IMAGE_ID, EOI_ID = range(len(SPECIAL_TOKENS))
VIDEO_ID = 497  # in `build_seeing_tokenizer`, the first that is unused elsewhere

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- '<|image|>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' -}}
{%- endif -%}
"""


def _to_byte_alphabet(text: str) -> str:
    """`text` in the printable stand-ins that the byte-level pre-tokenizer gives the model."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizer.pre_tokenize_str(text)[0][0]


def build_tokenizer(
    vocab_multiple: int = 64,
    *,
    more_tokens: Sequence[str] = (),  # special ones
    more_pieces: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """The tokenizer, its vocabulary padded with `<unused…>` to a multiple of `vocab_multiple`.

    More tokens and pieces take the places of the first unused ones.
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [piece for piece in map(_to_byte_alphabet, PIECES) if piece not in set(pieces)]
    vocab = SPECIAL_TOKENS + pieces
    assert len(set(vocab)) == len(vocab), "a piece is listed twice"
    vocab += [*more_tokens, *map(_to_byte_alphabet, more_pieces)]
    padded_size = math.ceil(len(vocab) / vocab_multiple) * vocab_multiple
    unused = [f"<unused{i}>" for i in range(padded_size - len(vocab))]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocab + unused], unk_id=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True) for token in [*SPECIAL_TOKENS, *more_tokens, *unused]
    ]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<turn|>",
        bos_token="<bos>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def build_seeing_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of models that see: chats may show videos, too."""
    tokenizer = build_tokenizer(more_tokens=["<|video|>"])
    image = "'<|image|>' if part['type'] == 'image' else "
    video = "'<|video|>' if part['type'] == 'video' else "
    tokenizer.chat_template = CHAT_TEMPLATE.replace(image, image + video)
    return tokenizer
