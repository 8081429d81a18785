"""Words of a command line that vLLM would complain about in its own."""

import json

import pytest

from vllm_dllm.startup.installation import EXAMPLES, check_json_options


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_that_is_none(name: str) -> None:
    """In two words or in one, and in either spelling; what the error shows is JSON."""
    joined = name.replace("-config", "_config") + "={canvas: 1}"
    for words in ([name, "{canvas: 1}"], [joined]):
        with pytest.raises(SystemExit, match=rf"^Error: {name} must be JSON, got '{{c") as error:
            check_json_options(["vllm", "serve", "model", *words])
    example = str(error.value).partition(f"as in {name} '")[2].removesuffix("'.")
    check_json_options(["vllm", "serve", "model", name, json.dumps(json.loads(example))])


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "model", "--additional-config", "{}"],
        ["vllm", "serve", "--additional-config.vllm_dllm.commit_last_block", "true"],
        ["vllm", "bench", "--additional-config", "{"],
    ],
    ids=["right", "dotted", "another command"],
)
def test_others(words: list[str]) -> None:
    check_json_options(words)
