"""Chats with pictures, or with tools, as token ids and patches: of pictures what transformers'
Gemma 4 processor makes, which needs torchvision."""

import base64
import json
from io import BytesIO
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerFast

from checkpoints.recipes.images.patches import num_tokens
from checkpoints.recipes.tokenizer import BOI_ID, EOI_ID, IMAGE_ID


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    images: list[Image.Image],
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The prompt of a chat, with all the tokens of each of its images between two marks."""
    text = tokenizer.apply_chat_template(
        [_for_template(message) for message in messages],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    left = iter(images)
    ids: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token == IMAGE_ID:
            ids += [BOI_ID, *[IMAGE_ID] * num_tokens(next(left)), EOI_ID]
        else:
            ids.append(token)
    return ids


def read_images(messages: list[dict[str, Any]]) -> list[Image.Image]:
    """The pictures of a chat, from its data URLs."""
    images = []
    for message in messages:
        if isinstance(message["content"], str):
            continue
        for part in message["content"]:
            if part["type"] == "image_url":
                encoded = part["image_url"]["url"].partition(";base64,")[2]
                images.append(Image.open(BytesIO(base64.b64decode(encoded))).convert("RGB"))
    return images


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's API as servers give it to the chat template."""
    made = {**message, "content": _parts(message["content"])}
    if "tool_calls" in message:
        made["tool_calls"] = [
            {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
            for call in message["tool_calls"]
            for function in [call["function"]]
        ]
    return made


def _parts(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as the chat template knows them."""
    if isinstance(content, str):
        return content
    return [{"type": "image"} if part["type"] == "image_url" else part for part in content]
