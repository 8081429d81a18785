"""Words of a command line that vLLM would complain about in its own."""

import pytest

from vllm_dllm.startup.installation import check_arguments


@pytest.mark.parametrize(
    "words",
    [["--additional-config", "{vllm_dllm: {}}"], ["--additional_config={"]],
    ids=["two words", "one word"],
)
def test_json_that_is_none(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^Error: --additional-config must be JSON, got '{"):
        check_arguments(["vllm", "serve", "model", *words])


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
    check_arguments(words)
