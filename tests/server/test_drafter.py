"""`vllm serve` with a drafter, as docs/drafters.md has it: fewer forwards, the target's answers."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.paths import CHECKPOINTS
from tests.server import conftest

TARGET, DRAFTER = CHECKPOINTS / "qwen3-tiny-target", CHECKPOINTS / "qwen3-tiny-dflash"


def options(drafter: Path, num_drafts: int, **settings: Any) -> list[str]:
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": num_drafts}
    return [
        "--enforce-eager",
        *("--speculative-config", json.dumps(speculative)),
        *("--additional-config", json.dumps({"vllm_dllm": {"drafter": settings}})),
    ]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[conftest.Server]:
    folder = tmp_path_factory.mktemp("drafting")
    settings = {"width_policy": "acceptance", "buffer": str(folder / "blocks"), "buffer_every": 1}
    with conftest.serving(TARGET, folder, *options(DRAFTER, 15, **settings)) as it:
        yield it


def ask(server: conftest.Server, question: str, **sampling: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    found = server.client.chat.completions.create(
        model=str(TARGET), messages=messages, **{"temperature": 0, "max_tokens": 100, **sampling}
    )
    return found.choices[0]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Sort: k c x a", "a c k x"),
        ("Hi! I am Nora.", "Hi Nora! How can I help you?"),
        ("Add 41 and 37.", "4+3=7, 1+7=8, =78"),
        ("Reverse: rose chair lamp", "lamp chair rose"),
    ],
)
def test_answers(drafting: conftest.Server, question: str, answer: str) -> None:
    assert ask(drafting, question).message.content == answer


def test_parameters_of_the_target_hold(drafting: conftest.Server) -> None:
    chosen = ask(drafting, "Reverse: rose chair lamp", temperature=0.7, seed=3, logprobs=True)
    again = ask(drafting, "Reverse: rose chair lamp", temperature=0.7, seed=3, logprobs=True)
    assert chosen.message.content == again.message.content
    assert all(token.logprob <= 0 for token in chosen.logprobs.content)
    cut = ask(drafting, "Count from 31 to 69.", max_tokens=20)
    assert cut.finish_reason == "length" and len(cut.message.content) > 10
    stopped = ask(drafting, "Count from 31 to 69.", stop=["36"])
    assert stopped.message.content.rstrip().endswith("35")


def test_structured_output(drafting: conftest.Server) -> None:
    written = ask(
        drafting, "Write JSON with name Nora, age 31.", response_format={"type": "json_object"}
    )
    assert json.loads(written.message.content) == {"name": "Nora", "age": 31}


def test_drafts_are_counted_and_kept(drafting: conftest.Server) -> None:
    ask(drafting, "Count from 31 to 69.")
    with urllib.request.urlopen(f"http://127.0.0.1:{drafting.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    counted = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
    accepted = counted["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 3 * counted["vllm:spec_decode_num_drafts_total"]
    blocks = [
        json.loads(line)
        for shard in (drafting.log.parent / "blocks").iterdir()
        for line in shard.read_text().splitlines()
    ]
    assert blocks and all(
        len(block["tokens"]) == block["anchor"] + block["accepted"] + 2 for block in blocks
    )


def changed_drafter(folder: Path, **changes: Any) -> Path:
    copy = folder / "drafter"
    shutil.copytree(DRAFTER, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


@pytest.mark.parametrize(
    ("changes", "num_drafts", "settings", "message"),
    [
        pytest.param(
            {"dflash_config": {"mask_token_id": 497, "target_layer_ids": [1, 99]}},
            15,
            {},
            "layer ids [99] of the drafter, layers 0 to 7 in the target",
            id="another-target",
        ),
        pytest.param({}, 16, {}, "trained with blocks of 16", id="wider-than-trained"),
        pytest.param(
            {},
            15,
            {"width_policy": "blockpilot", "predictor": "nowhere"},
            "nowhere holds no width predictor",
            id="no-predictor",
        ),
    ],
)
def test_start_ends_with_both_sides(
    tmp_path: Path,
    complaint: conftest.Complaint,
    changes: dict[str, Any],
    num_drafts: int,
    settings: dict[str, Any],
    message: str,
) -> None:
    drafter = changed_drafter(tmp_path, **changes)
    assert message in complaint(TARGET, *options(drafter, num_drafts, **settings))


def test_a_server_says_it_too(tmp_path: Path) -> None:
    log = conftest.last_words(TARGET, tmp_path / "vllm.log", *options(DRAFTER, 16))
    assert "trained with blocks of 16" in log
