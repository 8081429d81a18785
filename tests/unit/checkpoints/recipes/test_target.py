"""The small autoregressive target: what it is trained on, and the heads it starts with."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from checkpoints.recipes import train_target
from checkpoints.recipes.packing import encode_example
from checkpoints.recipes.run_log import earlier_log
from checkpoints.recipes.target_batches import training_batches
from checkpoints.recipes.target_model import initialize, target_config
from checkpoints.recipes.tasks import Example, generate
from checkpoints.recipes.tokenizer import EOS_ID, build_tokenizer
from checkpoints.recipes.train_target import FIRST_SHARES, LAST_SHARES
from tests import tolerances

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_batches_weigh_answers_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    batches = training_batches(tokenizer, lambda: LAST_SHARES, seed=0, tokens_per_batch=1024)
    tasks = set()
    for batch in itertools.islice(batches, 40):
        tasks |= set(batch.tasks)
        assert batch.tokens.numel() <= 1024 or len(batch.tokens) == 1
        for tokens, weight in zip(batch.tokens, batch.weight, strict=True):
            (weighed,) = weight.nonzero(as_tuple=True)
            answer = tokens[1:][weighed]
            assert weighed.tolist() == list(range(weighed[0], weighed[-1] + 1))
            assert answer[-1] == EOS_ID
            expected = torch.full(answer.shape, len(answer) ** -0.5)
            torch.testing.assert_close(weight[weighed], expected, **tolerances.short_formula())
            prompt = tokenizer.decode(tokens[: weighed[0] + 1])
            assert prompt.endswith("<turn|>\n<|turn>model\n")
            question = prompt.split("<|turn>user\n")[1].split("<turn|>")[0]
            assert not Example("", question, "").held_out
    assert tasks == set(LAST_SHARES)


@torch.no_grad()
def test_fresh_heads_find_the_value_of_a_key(tokenizer: PreTrainedTokenizerFast) -> None:
    model = Qwen3ForCausalLM(target_config(len(tokenizer)))
    model.set_attn_implementation("eager")
    initialize(model)
    found, back = [], []
    (colon,) = tokenizer.encode(": ", add_special_tokens=False)
    rng = random.Random(0)
    for _ in range(8):
        example = generate(rng, "lookup_dense", held_out=False)
        prompt, answer = encode_example(tokenizer, example)
        tokens = prompt + answer
        attentions = model(torch.tensor([tokens]), output_attentions=True).attentions
        back.append([attentions[0][0, i].diagonal(-i - 1)[4:].mean() for i in range(2)])
        for here in range(len(prompt), len(tokens)):
            if tokens[here] == colon:
                value = prompt.index(tokens[here - 1]) + 2
                found.append(attentions[1][0, (0, 2), here, value].max())
    assert torch.tensor(back).mean(0).min() > 0.8
    assert torch.tensor(found).mean() > 0.25  # of a hundred tokens


def test_a_run_leaves_a_target_and_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["train_target", "--minutes", "0.01", *arguments])
        train_target.main()

    run("--out", str(tmp_path / "first"), "--log-every", "1")
    run("--out", str(tmp_path / "second"), "--init-from", str(tmp_path / "first"))
    steps = [[e["step"] for e in earlier_log(tmp_path / n)] for n in ("first", "second")]
    assert steps[1][: len(steps[0])] == steps[0]
    assert steps[1][-1] > steps[0][-1]
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "second")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "second").eos_token == "<turn|>"
    assert set(FIRST_SHARES) < set(LAST_SHARES)
