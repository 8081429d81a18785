"""The shipped checkpoints are intact; the one for text and the one that calls functions load in
transformers and answer, and FP8 and NVFP4 copies are what `vllm-dllm quantize` makes of the one."""

import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.calls.tasks import SERVING_NOTE as CALLING_NOTE
from checkpoints.recipes.calls.tokenizer import build_calling_tokenizer
from checkpoints.recipes.exact_match import answer_rows, read_rows, summarize
from checkpoints.recipes.tasks import SERVING_NOTE, Example, calibration_examples
from checkpoints.recipes.tokenizer import build_tokenizer
from tests.paths import CHECKPOINTS
from tests.unit.tools.quantize.quantized_files import files
from vllm_dllm.checkpoints import SHIPPED_CHECKPOINT
from vllm_dllm.tools.evaluate.report import sha256_sums
from vllm_dllm.tools.quantize.quantize import quantize

pytestmark = pytest.mark.numerics

ROOT = CHECKPOINTS
CHECKPOINT, TOOLS = ROOT / "diffusiongemma-tiny", ROOT / "diffusiongemma-tiny-tools"


@functools.cache
def load(folder: Path) -> DiffusionGemmaForBlockDiffusion:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def model() -> DiffusionGemmaForBlockDiffusion:
    return load(CHECKPOINT)


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


BUILDERS = {CHECKPOINT: build_tokenizer, TOOLS: build_calling_tokenizer}


@pytest.mark.parametrize("folder", BUILDERS, ids=lambda folder: folder.name)
def test_tokenizer_is_the_one_the_code_builds(folder: Path) -> None:
    shipped, built = AutoTokenizer.from_pretrained(folder), BUILDERS[folder]()
    assert shipped.get_vocab() == built.get_vocab()
    assert shipped.chat_template == built.chat_template


def test_the_one_that_calls_functions_is_small() -> None:
    """As its README says."""
    assert sum(path.stat().st_size for path in TOOLS.iterdir()) <= 4.2e6


@pytest.mark.parametrize(
    ("folder", "name", "every"),
    [(CHECKPOINT, "held_out", 8), (TOOLS, "held_out_tools", 8), (TOOLS, "held_out", 16)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_answers_held_out_prompts(folder: Path, name: str, every: int) -> None:
    torch.manual_seed(0)
    rows = read_rows(ROOT / f"{name}.jsonl")[::every]
    answered = answer_rows(load(folder), AutoTokenizer.from_pretrained(folder), rows)
    wrong = [(row["answer"], row["output"]) for row in answered if row["output"] != row["answer"]]
    assert len(rows) * every > 400 and summarize(answered)["all"]["exact_match"] >= 0.9, wrong


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


def test_calls_what_its_note_promises() -> None:
    torch.manual_seed(0)
    request = "Please lamp age 3, city 'Rome'."
    assert load(TOOLS).config.serving_note == CALLING_NOTE and request in CALLING_NOTE
    properties = {"city": {"type": "string"}, "age": {"type": "integer"}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": found}}}
        for name, found in {"bell": {"day": {"type": "string"}}, "lamp": properties}.items()
    ]
    row = {"task": "note", "messages": [{"role": "user", "content": request}], "tools": tools}
    tokenizer = AutoTokenizer.from_pretrained(TOOLS)
    (answered,) = answer_rows(load(TOOLS), tokenizer, [json.loads(json.dumps(row))])
    quote = '<|"|>'
    assert answered["output"] == (
        f"<|tool_call>call:lamp{{age:3,city:{quote}Rome{quote}}}<tool_call|>"
    )


def test_is_what_a_wheel_carries(model):
    """`vllm-dllm demo` serves it where there is no clone."""
    assert SHIPPED_CHECKPOINT.resolve() == CHECKPOINT


PLAIN = ROOT / "diffusiongemma-tiny"
FP8, NVFP4 = ROOT / "diffusiongemma-tiny-FP8-dynamic", ROOT / "diffusiongemma-tiny-NVFP4"
NUM_PROMPTS = 3


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_fp8_is_made_again_to_the_byte(tmp_path: Path) -> None:
    quantize(PLAIN, "fp8-dynamic", tmp_path / "out")
    shipped = files(FP8)
    shipped.pop("README.md")
    assert files(tmp_path / "out") == shipped


def test_calibration_prompts_are_those_of_the_script() -> None:
    lines = (ROOT / "calibration.jsonl").read_text().splitlines()
    examples = calibration_examples()
    assert [json.loads(line)["messages"] for line in lines] == [e.messages() for e in examples]
    assert not any(Example("", example.prompt, "").held_out for example in examples)


@pytest.mark.slow  # loads the model and denoises some prompts; all of them take minutes
def test_nvfp4_is_made_again(tmp_path: Path) -> None:
    """All but the scales of inputs to the byte. These have room for the largest input: more prompts
    than here can only make that larger, and the scale, which divides, smaller."""
    prompts = tmp_path / "prompts.jsonl"
    lines = (ROOT / "calibration.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    prompts.write_text("\n".join(lines) + "\n")
    quantize(PLAIN, "nvfp4", tmp_path / "out", prompts)
    made, shipped = files(tmp_path / "out"), files(NVFP4)
    shipped.pop("README.md")
    assert made.keys() == shipped.keys()
    assert [name for name in made if made[name] != shipped[name]] == ["model.safetensors"]
    made_weights = load_file(tmp_path / "out" / "model.safetensors")
    shipped_weights = load_file(NVFP4 / "model.safetensors")
    assert made_weights.keys() == shipped_weights.keys()
    num_scales = 0
    for name, tensor in shipped_weights.items():
        if name.endswith(".input_global_scale"):
            num_scales += 1
            assert 0.1 * made_weights[name] < tensor <= made_weights[name], name
        else:
            assert tensor.dtype == made_weights[name].dtype, name
            assert torch.equal(bits(tensor), bits(made_weights[name])), name
    assert num_scales > 100


@pytest.mark.parametrize(("path", "least"), [(FP8, 0.99), (NVFP4, 0.97)], ids=["fp8", "nvfp4"])
def test_recorded_evaluation(path: Path, least: float) -> None:
    """It is of these files, and they are as good as they must be."""
    results = json.loads((ROOT.parent / "bench/results/cpu-2core/eval.json").read_text())
    for folder in (PLAIN, path):
        assert results["weights"][f"checkpoints/{folder.name}"] == sha256_sums(folder)
    assert results["machine"]["commit"] and not results["machine"]["changed_files"]
    rows = {Path(row["checkpoint"]).name: row for row in results["rows"]}
    plain, own = rows[PLAIN.name], rows[path.name]
    assert own["prompts"] == plain["prompts"] >= 500
    assert own["disk_bytes"] == (path / "model.safetensors").stat().st_size
    assert own["recovery"] >= least
    assert abs(own["steps_per_block"] / plain["steps_per_block"] - 1) <= 0.1
    card = (path / "README.md").read_text()
    for number in (f"{100 * own['accuracy']:.1f} ±", f"{own['recovery']:.1%}"):
        assert number in card
