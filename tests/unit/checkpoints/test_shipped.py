"""The shipped checkpoint is intact, loads in transformers and answers."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.exact_match import answer_rows, read_rows, summarize
from checkpoints.recipes.tasks import SERVING_NOTE
from checkpoints.recipes.tokenizer import build_tokenizer
from tests.paths import CHECKPOINTS
from vllm_dllm.checkpoints import SHIPPED_CHECKPOINT

pytestmark = pytest.mark.numerics

ROOT = CHECKPOINTS
CHECKPOINT = ROOT / "diffusiongemma-tiny"


@pytest.fixture(scope="module")
def model():
    return DiffusionGemmaForBlockDiffusion.from_pretrained(CHECKPOINT).eval()


def test_checksums():
    lines = (ROOT / "SHA256SUMS").read_text().splitlines()
    listed = dict(reversed(line.split(maxsplit=1)) for line in lines)
    shipped = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.safetensors")}
    assert len(shipped) == 10 and shipped <= listed.keys()
    for name, digest in listed.items():
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest, name


def test_small_bf16_file_without_tied_duplicates(model):
    path = CHECKPOINT / "model.safetensors"
    assert path.stat().st_size <= 8 * 2**20
    with safe_open(path, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    parameter_bytes = 2 * sum(p.numel() for p in model.parameters())
    assert path.stat().st_size < 1.05 * parameter_bytes


def test_shape_that_tests_and_quantization_rely_on(model):
    config = model.config
    text = config.text_config
    assert config.canvas_length == 64 and config.tie_word_embeddings
    assert set(text.layer_types) == {"sliding_attention", "full_attention"}
    assert text.final_logit_softcapping == 30.0 and text.num_experts > text.top_k_experts
    for name, parameter in model.model.decoder.named_parameters():
        # A scalar a row or a column can stay unquantised; a router has one row an expert.
        if parameter.dim() >= 2 and "router" not in name:
            assert all(size % 32 == 0 for size in parameter.shape[-2:]), name


def test_generation_config_is_complete(model):
    config = model.generation_config
    assert (config.t_min, config.t_max, config.max_denoising_steps) == (0.4, 0.8, 48)
    assert config.sampler_config.entropy_bound == 0.1
    assert (config.confidence_threshold, config.stability_threshold) == (0.005, 1)


def test_tokenizer_is_the_one_the_code_builds():
    shipped = AutoTokenizer.from_pretrained(CHECKPOINT)
    built = build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab()
    assert shipped.chat_template == built.chat_template


def test_answers_held_out_prompts(model):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    rows = read_rows(ROOT / "held_out.jsonl")[::8]
    answered = answer_rows(model, tokenizer, rows)
    wrong = [(row["answer"], row["output"]) for row in answered if row["output"] != row["answer"]]
    assert len(rows) >= 64 and summarize(answered)["all"]["exact_match"] >= 0.9, wrong


def test_answers_what_its_note_promises(model):
    """The note is what a user sees at the start of a server and of the demo."""
    torch.manual_seed(0)
    assert model.config.serving_note == SERVING_NOTE
    rows = [
        {"task": "note", "messages": [{"role": "user", "content": prompt}], "answer": answer}
        for prompt, answer in {
            "Add 23 and 41.": "2+4=6, 3+1=4, =64",
            "Sort: q d x a": "a d q x",
            "Reverse: rose chair lamp": "lamp chair rose",
            "Count from 31 to 69.": " ".join(map(str, range(31, 70))),
            "Write JSON with name Nora, age 31.": '{"name": "Nora", "age": 31}',
            "Hi! I am Nora.": "Hi Nora! How can I help you?",
            "Hello! What is the capital of France?": "Hello! The capital of France is Paris.",
            '{"roof": "Hugo", "cup": "Iris"} What is cup, roof?': "cup: Iris, roof: Hugo",
        }.items()
    ]
    for row in rows:
        assert row["messages"][0]["content"].rpartition("} ")[2] in SERVING_NOTE
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    answered = answer_rows(model, tokenizer, rows)
    assert [row["output"] for row in answered] == [row["answer"] for row in rows]


def test_is_what_a_wheel_carries(model):
    """`vllm-dllm demo` serves it where there is no clone."""
    assert SHIPPED_CHECKPOINT.resolve() == CHECKPOINT
