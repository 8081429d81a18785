"""A kernel with the arguments that it is compiled for, and its machine code for one chip."""

import hashlib
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

CHIPS = (80, 90, 100, 120)  # A100; H100 and H200; B200; RTX 50 and RTX PRO 6000
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Case:
    """Arguments that are not named here are int32, or what the kernel says. A field of an argument
    that is a named tuple is named ARGUMENT.FIELD."""

    kernel: Any
    pointers: Mapping[str, str]  # and the types of what they point to
    constants: Mapping[str, object]
    floats: Collection[str] = ()  # fp32 numbers
    tuples: Mapping[str, Any] = field(default_factory=dict)  # and their types
    options: Mapping[str, int] = field(default_factory=dict)
    multiplies: bool = False  # in its main loop, on the chip's own tensor cores
    loads_ahead: bool = False  # in its main loop, without waiting
    multiples: Collection[str] = ()  # integers that are multiples of 16, as are all strides
    loop_flops: int = 0  # that a pass of the main loop needs; 0: not counted
    passes: int = 1  # of the main loop, which a compiler may unroll
    spills: str = ""  # why its main loop may, all the same

    @property
    def source(self) -> str:
        """A digest of everything that is compiled: the kernel, the Triton functions of its module,
        types and constants. Comments do not count."""
        functions = [
            re.sub(r"\s*#.*", "", inspect.getsource(value.fn))
            for _, value in sorted(self.kernel.fn.__globals__.items())
            if type(value).__name__ in ("JITFunction", "InterpretedFunction")
        ]
        parts = (self.pointers, self.constants, self.options, dict.fromkeys(self.multiples))
        text = "\n".join((*functions, *(str(sorted(part.items())) for part in parts)))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def compile(self, chip: int) -> Any:
        """With strides that are multiples of 16, and addresses where the kernel counts on it."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        constants: dict[tuple[int, ...], object] = {}
        attributes: dict[tuple[int, ...], object] = {}
        said = {argument.name: argument.annotation_type for argument in self.kernel.params}
        anywhere = {
            argument.name
            for argument in self.kernel.params
            if argument.do_not_specialize_on_alignment
        }

        def kind(name: str, *path: int) -> str:
            if name in self.constants:
                constants[path] = self.constants[name]
                return "constexpr"
            is_aligned = name in self.pointers and name not in anywhere
            if is_aligned or name in self.multiples or "stride" in name:
                attributes[path] = _DIVISIBLE
            if name in self.pointers:
                return "*" + self.pointers[name]
            return "fp32" if name in self.floats else said.get(name) or "i32"

        signature: dict[str, Any] = {}
        for i, name in enumerate(self.kernel.arg_names):
            if group := self.tuples.get(name):
                kinds = (kind(f"{name}.{part}", i, j) for j, part in enumerate(group._fields))
                signature[name] = group(*kinds)
            else:
                signature[name] = kind(name, i)
        source = ASTSource(self.kernel, signature, constants, attributes)
        target = GPUTarget("cuda", chip, 32)
        return triton.compile(source, target=target, options=dict(self.options))
