"""What this project replaces in vLLM is what `compat/patches.py` says: no name more, none less."""

import ast
import inspect
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm

from scripts import upstream_table
from scripts.vllm_seams import concerns_version
from tests.paths import ROOT
from tests.processes import output_of
from vllm_dllm.compat.patches import CPU, MOST, PATCHES
from vllm_dllm.compat.patching import get_stock

PACKAGE = ROOT / "vllm_dllm"

ONLY_DURING_A_CALL = {
    "v1.engine.utils:get_mp_context",
    "model_executor.models.bailing_moe:FusedMoEFactory",
}

IN_A_FRESH_PROCESS = """
import importlib, json, multiprocessing, sys, types
from types import SimpleNamespace

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

on_cpu = sys.argv[1] == "cpu"
SERVER = "vllm.entrypoints.launchers.launcher"
for name in (
    SERVER,
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.compilation.decorators",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.warmup",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.model_executor.layers.fused_moe.oracle.unquantized",
    "vllm.model_executor.kernels.linear",
    "vllm.model_executor.models.config",
):
    importlib.import_module(name)

def names():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "vllm" or module is None:
            continue
        place = module_name.removeprefix("vllm").lstrip(".")
        for name, value in list(vars(module).items()):
            found[f"{place}:{name}"] = value
            if isinstance(value, type) and value.__module__ == module_name:
                for inner, held in list(vars(value).items()):
                    found[f"{place}:{name}.{inner}"] = held
                    if isinstance(held, dict):
                        found |= contents(f"{place}:{name}.{inner}", held)
            elif isinstance(value, dict) and not name.startswith("__"):
                found |= contents(f"{place}:{name}", value)
            elif type(value).__name__ == "TritonPlaceholder" and place == "triton_utils":
                found |= {f"{place}:{name}.{inner}": held for inner, held in vars(value).items()}
    return found

def contents(place, dictionary):
    return {
        f"{place}[]{key}": tuple(value) if isinstance(value, list) else value
        for key, value in list(dictionary.items())
    }

if not on_cpu:
    class Gpu(CpuPlatform):
        is_cpu = lambda self: False
        is_cuda = is_cuda_alike = lambda self: True
    vllm.platforms._current_platform = Gpu()
before = names()
of_the_installation = set(sys.modules)  # which is one of vLLM's build for CPUs

from vllm_dllm import plugin
from vllm_dllm.compat import drafting, scheduler, worker_logprobs

plugin.register()
scheduler.ask_for_draft_tokens_only_if_needed()
worker_logprobs.limit_prompt_logprob_rows(7)
if on_cpu:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm_dllm.config.workers import CPU_WORKER
    from vllm_dllm.cpu import cores, fork_server, install
    from vllm_dllm.cpu.compat.runner import allow_v2_worker_without_triton
    from vllm_dllm.cpu.quantization import layers
    from vllm_dllm.cpu.worker import TritonFreeCPUWorker

    install.cpu_cores.available_cpu_count = lambda: 2
    multiprocessing.parent_process = lambda: True
    install.install()
    fork_server.is_forked = lambda: True
    install.fork_processes()
    stock, CPUWorker.init_device = CPUWorker.init_device, lambda self: None
    worker = TritonFreeCPUWorker.__new__(TritonFreeCPUWorker)
    worker.vllm_config = SimpleNamespace(additional_config=None)
    worker.init_device()
    CPUWorker.init_device = stock
    allow_v2_worker_without_triton()
else:
    from vllm_dllm.drafters.worker import DraftWorker
    from vllm_dllm.step.runner.worker import CanvasWorker
    from vllm_dllm.scheduling import scheduler as _
    from vllm.v1.worker.gpu_worker import Worker

    stock, Worker.init_device = Worker.init_device, lambda self: None
    DraftWorker.__new__(DraftWorker).init_device()
    Worker.init_device = stock

def is_ours(value):
    kind = value if isinstance(value, type) else type(value)
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return "vllm_dllm" in (str(getattr(inner, "__module__", "")) or "").split(".")[0] or (
        kind.__module__.startswith("vllm_dllm")
    )

def is_kernel(value):
    return type(value).__name__ == "CpuKernel"

changed = set()
for place, value in names().items():
    was = before.get(place, value if place not in before and not is_ours(value) else None)
    if was is value or is_kernel(value):
        continue
    if isinstance(value, tuple) and isinstance(was, tuple) and was == value:
        continue
    plain = (bool, str, bytes, set, list, dict, type(None), types.ModuleType)
    if isinstance(value, plain) and not is_ours(value) and value != 7 and "HAS_TRITON" not in place:
        continue
    changed.add(place.partition("[]")[0] + ("[]" if "[]" in place else ""))
new = sys.modules.keys() - of_the_installation
cpu = sorted(name for name in new if name.startswith("vllm_dllm.cpu"))
print(json.dumps({"changed": sorted(changed), "cpu": cpu}))
"""

REGISTERED = {
    "model_executor.kernels.linear:_POSSIBLE_NVFP4_KERNELS[]",  # register_linear_kernel
    "reasoning.abs_reasoning_parsers:ReasoningParserManager.lazy_parsers[]",  # register_lazy_module
    "v1.attention.backends.registry:_ATTN_OVERRIDES[]",  # register_backend
}
"""Tables of vLLM's that have a function of their own to be added to."""


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_replaced_is_in_the_table(platform: str) -> None:
    printed = output_of("-c", IN_A_FRESH_PROCESS, platform, cwd=ROOT)
    found = json.loads(printed.splitlines()[-1])
    expected = {patch.target for patch in PATCHES if concerns_version(patch, vllm.__version__)}
    expected -= ONLY_DURING_A_CALL
    if platform == "gpu":
        expected -= {patch.target for patch in CPU}
        assert found["cpu"] == [], "a GPU's processes import nothing of a CPU's"
    assert set(found["changed"]) - REGISTERED == expected


def test_the_table_is_short() -> None:
    assert max(Counter(patch.target for patch in PATCHES).values()) == 1
    assert len(PATCHES) <= MOST


def test_the_docs_show_it() -> None:
    page = upstream_table.PAGE.read_text()
    assert page == upstream_table.replace_table(page), "run scripts/upstream_table.py"


def test_every_name_is_replaced_through_the_table() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name != "patching.py"
        for line in assignments(file)
    ]
    assert found == []


def assignments(file: Path) -> Iterator[int]:
    """Lines that set an attribute, or an entry, of what was imported from vLLM."""
    tree = ast.parse(file.read_text())
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "vllm"
    }
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "setattr":
            targets = [ast.Attribute(node.args[0], "")]
        for target in targets:
            inner, depth = target, 0
            while isinstance(inner, ast.Attribute | ast.Subscript):
                inner, depth = inner.value, depth + 1
            if depth and isinstance(inner, ast.Name) and inner.id in imported:
                yield node.lineno


def test_an_assignment_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import vllm.config as c\n"
        "from vllm.v1 import engine\n"
        "def f(self):\n"
        "    engine.core.EngineCore.step = f\n"
        "    c.TABLE['a'] = 1\n"
        "    setattr(engine, 'g', f)\n"
        "    self.engine = f\n"
    )
    assert list(assignments(file)) == [4, 5, 6]


WRAPPING = [file for file in sorted(PACKAGE.rglob("*.py")) if "@wrap(" in file.read_text()]


@pytest.mark.parametrize("file", WRAPPING, ids=lambda file: file.name)
def test_wrappers_have_the_names_of_vllms_parameters(file: Path) -> None:
    """Callers may pass any of them by name."""
    tree = ast.parse(file.read_text())
    texts = {
        node.targets[0].id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in node.decorator_list:
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "wrap"):
                continue
            target = eval(ast.unparse(call.args[0]), texts)
            stock = list(inspect.signature(get_stock(target)).parameters)
            ours = [parameter.arg for parameter in node.args.args[1:]]
            assert ours == stock[: len(ours)], target
            assert {parameter.arg for parameter in node.args.kwonlyargs} <= set(stock), target
