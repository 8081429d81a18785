"""Checks that a copy of vLLM's sources still has everything this project relies on.

Nothing in that copy is imported or run. Each check yields complaints, one line each, or nothing.
"""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType

import vllm_dllm
from scripts.seams import SEAMS, SIGNATURES, Seam
from vllm_dllm.compat.patches import PATCHES, Patch
from vllm_dllm.compat.version import is_at_least
from vllm_dllm.cpu.kernels import NATIVE_KERNELS

UNUSED = {
    *("BLOCK_SIZE", "LOOKAHEAD_BLOCK", "TOPK_BLOCK_SIZE", "TRITON_BLOCK_SIZE", "PER_TOKEN_COL"),
    *("cp_rank", "CP_INTERLEAVE", "dcp_sharded", "num_logits", "topk", "vocab_size"),
}
"""Parameters of Triton kernels that a native version may leave out, beside strides."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Sources:
    """The Python files of one vLLM."""

    def __init__(self, package: Path) -> None:
        """`package`: the folder `vllm`."""
        self.package = package
        self._modules: dict[str, tuple[str, ast.Module] | None] = {}

    def module(self, name: str) -> tuple[str, ast.Module] | None:
        """Returns text and syntax tree of a module in `vllm`, "" for itself; None if there is
        none."""
        if name not in self._modules:
            path = self.package.joinpath(*filter(None, name.split(".")))
            files = [path.with_suffix(".py"), path / "__init__.py"]
            file = next((file for file in files if file.is_file()), None)
            text = file.read_text() if file else ""
            self._modules[name] = (text, ast.parse(text)) if file else None
        return self._modules[name]

    @cached_property
    def version(self) -> str:
        """The version in `vllm/_version.py`, or "dev"."""
        found = re.search(r"^__version__ = .*?'(.+)'$", self.text("_version") or "", re.MULTILINE)
        return found[1] if found else "dev"

    def definition(self, place: str) -> Definition | None:
        """Returns the function or class at "module:Class.function", or None."""
        module_name, _, names = place.partition(":")
        module = self.module(module_name)
        nodes: list[ast.stmt] = module[1].body if module else []
        found = None
        for name in names.split("."):
            defined = (node for node in nodes if isinstance(node, Definition) and node.name == name)
            if (found := next(defined, None)) is None:
                return None
            nodes = found.body
        return found

    def home(self, place: str) -> str:
        """Returns the place where the function at `place` is defined: a module may have imported
        it."""
        module_name, _, name = place.partition(":")
        module = self.module(module_name)
        for node in module[1].body if module and self.definition(place) is None else ():
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name in (alias.asname, alias.name):
                        below = str(node.module).removeprefix("vllm").lstrip(".")
                        return f"{below}:{alias.name}"
        return place

    def binds(self, place: str) -> bool:
        """Whether there is something at "module:name", "module:Class.name" or "module:object.name".
        Attributes of objects are not checked."""
        module_name, _, names = place.partition(":")
        name, _, inner = names.partition(".")
        if (module := self.module(module_name)) is None or name not in _bound_names(module[1]):
            return False
        owner = self.definition(f"{module_name}:{name}")
        if not inner or not isinstance(owner, ast.ClassDef) or inner.startswith("__"):
            return True
        return inner in _bound_names(owner)

    def text(self, place: str) -> str | None:
        """Returns the source at `place`, or None if it is gone."""
        module = self.module(place.partition(":")[0])
        if module is None:
            return None
        if ":" not in place:
            return module[0]
        found = self.definition(place)
        return ast.get_source_segment(module[0], found) if found else None

    def parameters(self, place: str) -> ast.arguments | None:
        """Returns the parameters of the function at `place`, or None if there is no function."""
        found = self.definition(place)
        return None if found is None or isinstance(found, ast.ClassDef) else found.args


def concerns_version(what: Seam | Patch, version: str) -> bool:
    """Whether a seam or patch concerns this version of vLLM."""
    begun = is_at_least(what.since, version)
    return begun and (what.until is None or not is_at_least(what.until, version))


def moved_seams(sources: Sources) -> Iterator[str]:
    """Yields seams that are gone or no longer say what they must."""
    for seam in SEAMS:
        if not concerns_version(seam, sources.version):
            continue
        text = sources.text(seam.place)
        if text is None:
            yield f"{seam.what}: vllm.{seam.place} is gone"
        elif seam.text not in text:
            yield f"{seam.what}: vllm.{seam.place} no longer says: {seam.text}"


def changed_signatures(sources: Sources) -> Iterator[str]:
    """Yields functions that we replace or call and whose parameters have changed, and other names
    that we replace and that are gone."""
    expected_of = dict(SIGNATURES)
    for patch in PATCHES:
        if concerns_version(patch, sources.version):
            if patch.takes is not None:
                expected_of[sources.home(patch.target)] = patch.takes
            elif not sources.binds(patch.target.removesuffix("[]")):
                yield f"vllm.{patch.target} is gone"
    for place, expected in expected_of.items():
        if (found := sources.parameters(place)) is None:
            yield f"vllm.{place} is gone"
        elif _parameter_names(found) != expected.split():
            yield f"vllm.{place} takes {_parameter_names(found)}, expected {expected.split()}"


def changed_kernels(sources: Sources) -> Iterator[str]:
    """Yields kernels that lack a parameter of their native version, or have one that this does not
    know. `tests/unit/cpu` compares results."""
    for name, native in NATIVE_KERNELS.items():
        place = ":".join(name.removeprefix("vllm.").rsplit(".", 1))
        if (found := sources.parameters(place)) is None:
            yield f"kernel {name} is gone"
            continue
        kernel = {p.removesuffix("_ptr") for p in _parameter_names(found)}
        own = inspect.signature(native).parameters
        needed = {p.name for p in own.values() if p.default is p.empty} - {"grid"}
        unknown = {p for p in kernel - own.keys() - UNUSED if not re.search(r"_stride(_\d)?$", p)}
        if unknown or not needed <= kernel:
            yield f"kernel {name} takes {sorted(kernel)}, ours {list(own)}"


def rewritten_kernels(sources: Sources, others: Sources) -> Iterator[str]:
    """Yields kernels with a native version whose code, or code they call, differs between two
    vLLMs."""
    for name in NATIVE_KERNELS:
        place = ":".join(name.removeprefix("vllm.").rsplit(".", 1))
        if _read_kernel_code(sources, place) != _read_kernel_code(others, place):
            yield name


def _read_kernel_code(sources: Sources, place: str) -> dict[str, str]:
    """Returns the code of a kernel and of the functions it calls, by name, without comments."""
    found: dict[str, str] = {}
    waiting = [place]
    while waiting:
        module_name, _, name = waiting.pop().partition(":")
        definition = sources.definition(f"{module_name}:{name}")
        if definition is None or name in found:
            continue
        found[name] = ast.unparse(definition)
        module = sources.module(module_name)
        assert module is not None
        imported = {
            alias.name: str(node.module).removeprefix("vllm.")
            for node in ast.walk(module[1])
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        names = {n.func.id for n in _calls(definition) if isinstance(n.func, ast.Name)}
        waiting += [f"{imported.get(called, module_name)}:{called}" for called in names]
    return found


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls in a syntax tree."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def missing_imports(sources: Sources) -> Iterator[str]:
    """Yields imports of this project that this vLLM does not have."""
    for file, module_name, name in _our_imports():
        below = module_name.removeprefix("vllm").removeprefix(".")
        if sources.module(below) is None:
            yield f"{file} imports {module_name}, which is gone"
        elif not _has_name(sources, below, name):
            yield f"{file} imports {name} from {module_name}, which does not have it"


def changed_overrides(sources: Sources) -> Iterator[str]:
    """Yields methods of ours that override vLLM's and take other parameters."""
    for cls in _our_classes():
        bases = [base for base in cls.__mro__ if base.__module__.startswith("vllm.")]
        for name, method in vars(cls).items():
            if not isinstance(method, FunctionType) or name.startswith("__"):
                continue
            if not any(name in vars(base) for base in bases):
                continue
            places = [f"{base.__module__[5:]}:{base.__qualname__}.{name}" for base in bases]
            found = filter(None, map(sources.parameters, places))
            if (theirs := next(found, None)) is None:
                yield f"{cls.__qualname__}.{name} overrides a method of vLLM that is gone"
            elif refused := _refused_parameters(theirs, inspect.signature(method)):
                yield f"{cls.__qualname__}.{name} does not take {refused} as vLLM's does"


def _parameter_names(arguments: ast.arguments) -> list[str]:
    """Returns all parameters' names, except `*` and `**`."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every]


def _refused_parameters(theirs: ast.arguments, ours: inspect.Signature) -> list[str]:
    """Returns parameters of vLLM's method that ours lacks or has at another position, and those
    that only ours requires."""
    own = list(ours.parameters.values())
    kinds = {p.kind for p in own}
    by_position = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    refused = []
    for i, argument in enumerate([*theirs.posonlyargs, *theirs.args]):
        placed = i < len(by_position) and by_position[i].name == argument.arg
        swallowed = i >= len(by_position) and inspect.Parameter.VAR_POSITIONAL in kinds
        named = argument.arg in ours.parameters or inspect.Parameter.VAR_KEYWORD in kinds
        if not (placed or (swallowed and named)):
            refused.append(argument.arg)
    for argument in theirs.kwonlyargs:
        if argument.arg not in ours.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            refused.append(argument.arg)
    needed = {p.name for p in by_position if p.default is p.empty}
    return refused + sorted(needed - set(_parameter_names(theirs)))


def _has_name(sources: Sources, module_name: str, name: str) -> bool:
    """Whether `name` can be imported from a module: it is bound there, is a submodule, is bound in
    a module imported with `*`, or is one of the names that the package `vllm` imports lazily."""
    if (module := sources.module(module_name)) is None:
        return False
    text, tree = module
    if name in _bound_names(tree) or sources.module(f"{module_name}.{name}".strip(".")) is not None:
        return True
    if module_name == "" and f'"{name}"' in text:
        return True
    whole = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return any(
        _has_name(sources, f"{module_name}.{node.module}".strip("."), name) for node in whole
    )


def _bound_names(tree: ast.AST) -> set[str]:
    """Returns the names that a module binds at top level, also under `if` and `try`."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (n for target in targets for n in ast.walk(target))
            found |= {n.id for n in names if isinstance(n, ast.Name)}
        else:
            found |= _bound_names(node)
    return found


def _our_imports() -> Iterator[tuple[str, str, str]]:
    """Yields (file, module, name) of every `from vllm... import name`."""
    folder = Path(vllm_dllm.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"vllm(\.|$)", node.module or ""):
                for alias in node.names:
                    yield str(file.relative_to(folder.parent)), str(node.module), alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("vllm."):
                        parent, _, name = alias.name.rpartition(".")
                        yield str(file.relative_to(folder.parent)), parent, name


def _our_classes() -> Iterator[type]:
    """Yields the classes of our modules that serve."""
    for module in _our_modules():
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value


def _our_modules() -> Iterator[ModuleType]:
    """Yields our modules that serve. Tools have no subclasses of vLLM's classes."""
    for info in pkgutil.walk_packages(vllm_dllm.__path__, "vllm_dllm."):
        if not info.name.startswith("vllm_dllm.tools") and "triton" not in info.name.split(".")[-1]:
            yield import_module(info.name)


CHECKS = (
    missing_imports,
    moved_seams,
    changed_signatures,
    changed_kernels,
    changed_overrides,
)
