"""`vllm serve` with a drafter, as docs/drafters.md has it: fewer forwards, the target's answers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from tests.paths import CHECKPOINTS
from tests.server import conftest
from tests.server.dashboard_queries import check, queries
from vllm_dllm.metrics.prometheus import DRAFT_HISTOGRAMS, PREFIX

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
    return server.chat(question, **{"temperature": 0, "max_tokens": 100, **sampling}).choices[0]


def test_parameters_of_the_target_hold(drafting: conftest.Server) -> None:
    assert ask(drafting, "Sort: k c x a").message.content == "a c k x"
    chosen = ask(drafting, "Reverse: rose chair lamp", temperature=0.7, seed=3, logprobs=True)
    again = ask(drafting, "Reverse: rose chair lamp", temperature=0.7, seed=3, logprobs=True)
    assert chosen.message.content == again.message.content
    assert all(token.logprob <= 0 for token in chosen.logprobs.content)
    cut = ask(drafting, "Count from 31 to 69.", max_tokens=20)
    assert cut.finish_reason == "length" and len(cut.message.content) > 10
    stopped = ask(drafting, "Count from 31 to 69.", stop=["36"])
    assert stopped.message.content.rstrip().endswith("35")


def test_penalties_bring_no_excluded_token_back(drafting: conftest.Server) -> None:
    body = {"allowed_token_ids": [7], "return_token_ids": True, "ignore_eos": True}
    for penalty in (1e-6, 1e6):
        found = complete(drafting, [5, 5, 5], extra_body={**body, "repetition_penalty": penalty})
        assert set(found.token_ids) == {7}
    # What vLLM's sampler has no room for it finds in the worker, where an error ends the engine.
    for key, wrong in (("repetition_penalty", 1e-320), ("allowed_token_ids", [7] * 1025)):
        with pytest.raises(BadRequestError, match=f"{key} must "):
            complete(drafting, [5, 5, 5], extra_body={**body, key: wrong})


def complete(server: conftest.Server, prompt: list[int], **options: Any) -> Any:
    asked = {"model": server.model, "temperature": 0, "max_tokens": 16, **options}
    return server.client.completions.create(prompt=prompt, **asked).choices[0]


def test_the_dashboard_asks_for_what_there_is(drafting: conftest.Server) -> None:
    shown = check((q for q in queries() if q.needs_drafter), drafting.read("/metrics"))
    assert shown == {f"{PREFIX}{name}" for name in DRAFT_HISTOGRAMS}


def test_drafts_are_counted_and_kept(drafting: conftest.Server) -> None:
    ask(drafting, "Count from 31 to 69.")
    lines = drafting.read("/metrics").splitlines()
    counted = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
    accepted, drafted, drafts = (
        counted[f"vllm:spec_decode_num_{name}_total"]
        for name in ("accepted_tokens", "draft_tokens", "drafts")
    )
    assert accepted > 3 * drafts
    assert counted["vllm_dllm:acceptance_length_sum"] == accepted + drafts
    assert counted["vllm_dllm:draft_width_sum"] == drafted
    for name in DRAFT_HISTOGRAMS:
        assert counted[f"vllm_dllm:{name}_count"] == drafts
    blocks = [
        json.loads(line)
        for shard in (drafting.log.parent / "blocks").iterdir()
        for line in shard.read_text().splitlines()
    ]
    assert blocks and all(
        len(block["tokens"]) == block["anchor"] + block["accepted"] + 2 for block in blocks
    )


@pytest.mark.parametrize(
    ("layers", "settings", "message"),
    [
        ([1, 99], {}, "layer ids [99] of the drafter, layers 0 to 7 in the target"),
        (
            [1, 3, 5],
            {"width_policy": "blockpilot", "predictor": "nowhere"},
            "nowhere holds no width predictor",
        ),
    ],
    ids=["another target", "no predictor"],
)
def test_start_ends_with_both_sides(
    tmp_path: Path,
    complaint: conftest.Complaint,
    layers: list[int],
    settings: dict[str, Any],
    message: str,
) -> None:
    copy = Path(shutil.copytree(DRAFTER, tmp_path / "drafter"))
    config = json.loads((copy / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = layers
    (copy / "config.json").write_text(json.dumps(config))
    assert message in complaint(TARGET, *options(copy, 15, **settings))
