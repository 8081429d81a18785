"""`vllm-dllm quantize`: what it writes and what it says."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from bench.dummy_checkpoint import SHAPE_26B
from tests import tolerances
from tests.unit.tools.quantize.quantized_files import INDEX, LAYER, read
from vllm_dllm import cli
from vllm_dllm.config.architectures import DIFFUSION_GEMMA
from vllm_dllm.cpu.formats import decode_int4, decode_nvfp4
from vllm_dllm.quantization.schemes import GROUP_SIZE, INT4_GROUP_SIZE
from vllm_dllm.quantization.weight_files import TensorInfo
from vllm_dllm.tools.quantize import calibrate as calibrate_module
from vllm_dllm.tools.quantize import quantize as quantize_module
from vllm_dllm.tools.quantize.calibrate import NUM_CANVASES, NUM_PROMPTS, calibrate
from vllm_dllm.tools.quantize.plan import make_plan, quantized_bytes
from vllm_dllm.tools.quantize.quantize import quantize
from vllm_dllm.tools.quantize.source import Source, read_source

pytestmark = pytest.mark.numerics


def linears(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Module name in the quantised checkpoint -> matrix; written out, apart from the code's own."""
    matrices = {}
    for name, weight in weights.items():
        if not name.startswith("model.decoder.layers."):
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(w.chunk(2) for w in weight):
                prefix = name.removesuffix("gate_up_proj")
                matrices[f"{prefix}{expert}.gate_proj"] = gate.float()
                matrices[f"{prefix}{expert}.up_proj"] = up.float()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(weight):
                matrices[f"{name.removesuffix('down_proj')}{expert}.down_proj"] = down.float()
        elif name.endswith("_proj.weight"):
            matrices[name.removesuffix(".weight")] = weight.float()
    return matrices


def test_fp8_weights_within_their_rounding(checkpoint, fp8):
    written = read(fp8)
    expected = linears(read(checkpoint))
    # 3 layers with values and one without, dense MLPs, 4 experts a layer
    assert len(expected) == 3 * 4 + 3 + 4 * 3 + 4 * 4 * 3
    for module, weight in expected.items():
        fp8_weight, scale = written[f"{module}.weight"], written[f"{module}.weight_scale"]
        assert fp8_weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert scale.shape == (len(weight), 1)
        error = (fp8_weight.float() * scale - weight).abs()
        # Three bits behind the point: half a gap is 1/16 of a power of two. Below fp8's normal
        # numbers the gap stays 2^-9. The last term is fp32's rounding of scale and product.
        bound = torch.maximum(weight.abs() / 16, scale * 2**-10) + tolerances.SHORT * weight.abs()
        assert (error <= bound).all(), module
        assert error.max() > 0.1 * bound.max()
        assert (fp8_weight.float().abs().amax(1) == 448).all(), "a row's largest weight is 448"


def test_nvfp4_weights_within_their_rounding(checkpoint, fp4):
    written = read(fp4)
    for module, weight in linears(read(checkpoint)).items():
        packed, groups, scale = (
            written[f"{module}.weight_{part}"] for part in ("packed", "scale", "global_scale")
        )
        assert groups.dtype == torch.float8_e4m3fn
        steps = groups.float() / scale
        largest = weight.unflatten(-1, (-1, GROUP_SIZE)).abs().amax(-1)
        # A group's largest is 6 steps, whose three bits behind the point are rounded.
        slack = (1 / 16 + tolerances.SHORT) * largest
        assert ((6 * steps - largest).abs() <= slack).all(), module
        steps = steps.repeat_interleave(GROUP_SIZE, 1)
        size = weight.abs() / steps
        # e2m1's numbers are 0.5 apart up to 2, 1 up to 4, and 2 up to 6, which is the last.
        half_gap = torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
        bound = torch.maximum(half_gap, size - 6) * steps + tolerances.SHORT * weight.abs()
        values = decode_nvfp4(packed, groups, scale).values / scale
        assert ((values - weight).abs() <= bound).all(), module


def test_integer_weights_within_their_rounding(checkpoint, int8, int4):
    by_row, by_group = read(int8), read(int4)
    for module, weight in linears(read(checkpoint)).items():
        values, scale = by_row[f"{module}.weight"], by_row[f"{module}.weight_scale"]
        assert values.dtype == torch.int8 and scale.shape == (len(weight), 1)
        assert scale.dtype == torch.float32
        # Half a step; 127.5 of them reach the largest, and the top code is 127.
        slack = tolerances.SHORT * weight.abs().amax()
        assert ((values.float() * scale - weight).abs() <= 0.5 * scale + slack).all(), module

        packed, scale = by_group[f"{module}.weight_packed"], by_group[f"{module}.weight_scale"]
        assert packed.dtype == torch.int32 and scale.dtype == torch.bfloat16
        assert by_group[f"{module}.weight_shape"].tolist() == list(weight.shape)
        steps = scale.float().repeat_interleave(INT4_GROUP_SIZE, 1)
        # 7.5 steps, rounded to 8 bits, reach the largest, and the top code is 7.
        most = (0.5 + 7.5 / 256) * steps + slack
        assert ((decode_int4(packed, scale.float()) - weight).abs() <= most).all(), module


def global_scale(amax: torch.Tensor | float) -> torch.Tensor:
    """Which divides: the largest group scale becomes fp8's largest number."""
    return (448 * 6 / torch.as_tensor(amax)).reshape(1)


@pytest.mark.parametrize("part", ["weight_global_scale", "input_global_scale"])
def test_what_vllm_fuses_shares_its_global_scales(checkpoint, fp4, part):
    written, weights = read(fp4), linears(read(checkpoint))
    fused = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.gate_proj", "mlp.up_proj"]]
    fused += [[f"experts.{e}.gate_proj", f"experts.{e}.up_proj"] for e in range(4)]
    for layer in range(4):
        prefix = f"model.decoder.layers.{layer}."
        for group in fused:
            modules = [prefix + module for module in group]
            if "self_attn" in group[0] and layer < 3:  # the fourth has no values
                modules.append(f"{prefix}self_attn.v_proj")
            scales = torch.cat([written[f"{module}.{part}"] for module in modules])
            assert scales.dtype == torch.float32 and len(scales.unique()) == 1, modules
            if part == "weight_global_scale":
                largest = torch.cat([weights[module].flatten() for module in modules]).abs().amax()
                assert torch.equal(scales[:1], global_scale(largest))
        if part == "input_global_scale":
            for projection in ("gate_proj", "up_proj", "down_proj"):
                names = [f"{prefix}experts.{e}.{projection}.{part}" for e in range(4)]
                assert len(torch.cat([written[name] for name in names]).unique()) == 1, names


class LinearInputs(TorchFunctionMode):
    """The largest input of every matrix that F.linear is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[tuple[int, torch.Size], float] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            key = (args[1].data_ptr(), args[1].shape)
            self.largest[key] = max(self.largest.get(key, 0.0), args[0].abs().max().item())
        return function(*args, **(kwargs or {}))


def test_input_scales_are_of_the_denoising_loop(checkpoint, fp4, prompts):
    """Seen from outside: every matrix multiplication of `generate`, prompts and canvases."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        checkpoint, experts_implementation="eager"
    ).eval()
    inputs = LinearInputs()
    for i, tokens in enumerate(calibrate_module.read_prompts(prompts, checkpoint, model.config)):
        torch.manual_seed(i)
        with torch.no_grad(), inputs:
            model.generate(
                input_ids=torch.tensor([tokens]),
                max_new_tokens=NUM_CANVASES * model.config.canvas_length,
            )
    written = read(fp4)
    for i, layer in enumerate(model.model.decoder.layers):
        prefix = f"model.decoder.layers.{i}."
        for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            weight = layer.get_submodule(module).weight
            largest = inputs.largest[weight.data_ptr(), weight.shape]
            expected = global_scale(largest)
            assert torch.equal(written[f"{prefix}{module}.input_global_scale"], expected), module
        for part, stack in (
            ("gate_proj", layer.experts.gate_up_proj),
            ("down_proj", layer.experts.down_proj),
        ):
            seen = [inputs.largest.get((w.data_ptr(), w.shape), 0.0) for w in stack]
            expected = global_scale(max(seen))
            scale = written[f"{prefix}experts.0.{part}.input_global_scale"]
            assert torch.equal(scale, expected), part


SCHEMES = {"fp8": "fp8-dynamic", "fp4": "nvfp4", "int8": "int8", "int4": "w4a16"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everything_else_is_kept(checkpoint, scheme, request):
    out = request.getfixturevalue(scheme)
    source, written = read(checkpoint), read(out)
    modules = linears(source)
    kept = {
        name: weight
        for name, weight in source.items()
        if ".experts." not in name and name.removesuffix(".weight") not in modules
    }
    assert len(kept) > 50
    for name, weight in kept.items():
        assert torch.equal(written.pop(name), weight) and weight.dtype == torch.bfloat16, name
    assert {name.rpartition(".")[0] for name in written} == set(modules)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (checkpoint / name).read_bytes()
    index = json.loads((out / INDEX).read_text())
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            assert {n for n, f in index["weight_map"].items() if f == file.name} == set(
                shard.keys()
            )
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in read(out).values())
    planned = make_plan(SCHEMES[scheme], read_source(checkpoint))
    assert sum(w.nbytes for w in written.values()) == sum(
        quantized_bytes(linear, planned.scheme)
        for parts in planned.quantized.values()
        for linear in parts
    )


@pytest.mark.parametrize(
    ("scheme", "preset", "format"),
    [
        ("fp8", "FP8_DYNAMIC", "float-quantized"),
        ("fp4", "NVFP4", "nvfp4-pack-quantized"),
        ("int8", "W8A8", "int-quantized"),
    ],
)
def test_config_is_compressed_tensors_own(checkpoint, scheme, preset, format, request):
    config = json.loads((request.getfixturevalue(scheme) / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((checkpoint / "config.json").read_text())
    parsed = QuantizationConfig.model_validate(quantization)
    again = {"version": quantization["version"], **parsed.model_dump(mode="json")}
    assert again == quantization
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == format
    assert quantization["quantization_status"] == "compressed"
    group = parsed.config_groups["group_0"]
    expected = preset_name_to_scheme(preset, ["Linear"])
    assert group.targets == ["Linear"] and group.format == format
    assert (group.weights, group.input_activations) == (
        expected.weights,
        expected.input_activations,
    )
    assert {"lm_head", f"{LAYER}router.proj", "model.decoder.self_conditioning.up_proj"} < set(
        parsed.ignore
    )
    quantised = linears(read(checkpoint))
    assert not quantised.keys() & set(parsed.ignore)


def test_layout_of_the_published_checkpoint():
    """RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic: 27.1977 GB, 255 modules ignored, and 11725
    linears quantised; google/diffusiongemma-26B-A4B-it: 1047 tensors, 51.6476 GB."""
    vision_config = {
        "model_type": "gemma4_vision",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "patch_size": 16,
        "standardize": True,
    }
    config = DiffusionGemmaConfig(text_config=SHAPE_26B, vision_config=vision_config)
    with torch.device("meta"):
        state = DiffusionGemmaForBlockDiffusion(config).state_dict()
    tensors = {
        name: TensorInfo(tuple(weight.shape), "BF16")
        for name, weight in state.items()
        if name != "lm_head.weight"
        and (".language_model." not in name or name.endswith(".layer_scalar"))
    }
    assert len(tensors) == 1047
    assert sum(info.num_bytes for info in tensors.values()) == pytest.approx(
        51.6476e9, abs=tolerances.PUBLISHED_BYTES
    )
    shards = {"model.safetensors": tensors}
    described = config.to_dict() | {"architectures": [DIFFUSION_GEMMA]}
    plan = make_plan("fp8-dynamic", Source(Path(), described, shards, has_index=False))
    linears = [linear for parts in plan.quantized.values() for linear in parts]
    assert len(linears) == 11725 and len(plan.ignore) == 255
    size = sum(quantized_bytes(linear, "fp8-dynamic") for linear in linears)
    size += sum(tensors[name].num_bytes for name in plan.kept)
    size -= 2 * sum(linear.shape[0] for linear in linears)  # scales are bf16 there, fp32 here
    assert size == pytest.approx(27.1977e9, abs=tolerances.PUBLISHED_BYTES)


@pytest.mark.parametrize(
    ("scheme", "share"),
    [("fp8-dynamic", "0.5"), ("int8", "0.5"), ("nvfp4", "0.2"), ("w4a16", "0.2")],
)
def test_dry_run(checkpoint, tmp_path, scheme, share, capsys):
    assert cli.main(["quantize", str(checkpoint), "--scheme", scheme, "--dry-run"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["model.decoder.layers.{0-2}.self_attn.v_proj"][0] == "3"
    assert rows["model.decoder.layers.{0-3}.experts.gate_up_proj"][0] == str(4 * 4 * 2)
    assert rows["total"][-1].startswith(share) and rows["total"][-1].endswith("x")
    for reason in ("router:", "norms", "embeddings,", "self-conditioning:", "vision"):
        assert reason in rows
    assert scheme in text and rows["checkpoint"][-1].endswith("x")


def test_progress_is_shown(checkpoint, tmp_path, capsys):
    quantize(checkpoint, "fp8-dynamic", tmp_path / "out")
    said = capsys.readouterr()
    assert "checking weights" in said.err and "quantising to fp8-dynamic" in said.err
    assert said.out == f"Wrote {tmp_path / 'out'}\n"
    count = len(read(checkpoint))
    assert f"{count}/{count}" in said.err


def test_experts_without_tokens_are_counted_and_take_their_layer_s_scale(
    checkpoint, prompts, tmp_path, monkeypatch, capsys
):
    def without_expert_3(*args) -> calibrate_module.Ranges:
        ranges = calibrate(*args)
        for part in ("gate_up_proj", "down_proj"):
            ranges[f"{LAYER}experts.{part}"][3] = 0.0
        return ranges

    monkeypatch.setattr(quantize_module, "calibrate", without_expert_3)
    quantize(checkpoint, "nvfp4", tmp_path / "out", prompts)
    assert "1 experts in 1 layers saw no token" in capsys.readouterr().err
    written = read(tmp_path / "out")
    for part in ("gate_proj", "down_proj"):
        scales = [written[f"{LAYER}experts.{e}.{part}.input_global_scale"] for e in (0, 3)]
        assert torch.equal(*scales)


def test_prompts_are_spread_over_the_file(checkpoint, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"Count from {i}"}) for i in range(10, 522)))
    config = DiffusionGemmaConfig.from_pretrained(checkpoint)
    chosen = calibrate_module.read_prompts(path, checkpoint, config)
    everything = path.read_text().splitlines()
    path.write_text("\n".join(everything[:: 512 // NUM_PROMPTS]))
    assert len(chosen) == NUM_PROMPTS
    assert chosen == calibrate_module.read_prompts(path, checkpoint, config)


def test_a_config_that_says_not_quantised(checkpoint: Path, tmp_path: Path) -> None:
    """`null` is what some tools write."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_source(tmp_path).tensors == read_source(checkpoint).tensors
