"""`vllm-dllm tune` of the shipped checkpoint, and a server with what it wrote."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from openai import OpenAI

from tests.server.conftest import CHECKPOINT, OPTIONS, UNCOMPILED
from vllm_dllm import cli
from vllm_dllm.tools.server_process import Server, choose_port, serve_command

TRIALS, PROMPTS = 3, 16


@pytest.mark.thorough
def test_found_settings_are_served(tmp_path: Path) -> None:
    task, out = CHECKPOINT.parent / "held_out.yaml", tmp_path / "tuning"
    options = ["--task", str(task), "--limit", str(PROMPTS), "--trials", str(TRIALS)]
    options += ["-o", str(out), f"--serve-options={shlex.join((*UNCOMPILED, *OPTIONS))}"]
    assert cli.main(["tune", str(CHECKPOINT), *options]) == 0
    found = json.loads((out / "tune.json").read_text())
    own, *others = found["searched"]
    assert own["own"] and own["accuracy"] == 1.0
    assert len(others) == TRIALS - 1
    # Other settings reach the sampler: noise has the same seeds, yet steps differ.
    assert {trial["forwards"] for trial in others} != {own["forwards"]}
    (chosen,) = (row for row in found["confirmed"] if row["chosen"])
    assert chosen["difference"] >= -0.005

    defaults = out / "defaults.yaml"
    section = yaml.safe_load(defaults.read_text())["additional-config"]["vllm_dllm"]
    assert section["defaults"] == chosen["keys"]
    port = choose_port(None)
    command = serve_command(CHECKPOINT, port, *UNCOMPILED, *OPTIONS, "--config", str(defaults))
    with Server(command, port, tmp_path / "server.log") as server:
        server.wait_until_ready(lambda seconds: None)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model=str(CHECKPOINT), messages=[{"role": "user", "content": "Sort: q d x a"}], seed=1
        )
    assert answer.choices[0].message.content == "a d q x"
