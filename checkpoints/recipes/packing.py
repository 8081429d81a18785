"""Turns examples into token ids."""

from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.tasks import Example
from checkpoints.recipes.tokenizer import EOS_ID

POOL_SIZE = 384  # examples that are packed together


def encode_example(
    tokenizer: PreTrainedTokenizerFast, example: Example
) -> tuple[list[int], list[int]]:
    """(prompt, answer) as token ids; the answer ends with EOS."""
    text = tokenizer.apply_chat_template(
        example.messages(), tools=example.tools(), tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return prompt, [*tokenizer.encode(example.answer, add_special_tokens=False), EOS_ID]
