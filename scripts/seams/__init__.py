"""Places in vLLM that `vllm_dllm/compat` depends on, and what each must still say, as data.

`scripts/vllm_seams.py` looks for them in any copy of vLLM's sources: `tests/unit/compat` in the
installed one, `scripts/check_vllm.py VERSION` in any other. If a seam has moved, read the new
source, then change `compat/`.

The text files have, for each seam, what we rely on, below it the place, with the versions of vLLM
that differ, and behind bars the text that must be in the source there.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_dllm.compat import log_lines


@dataclass(frozen=True)
class Seam:
    """A place in vLLM and what it must say."""

    what: str
    """What we rely on, for the error."""
    place: str
    """module:names below `vllm`, or the module alone."""
    text: str
    """Text that must be in the source there."""
    since: str = "0"
    until: str | None = None
    """The first version that no longer has it."""


def read_seams(file: Path) -> Iterator[Seam]:
    """Yields the seams of a text file."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    for seam in re.split(r"\n(?! )", "\n".join(lines)):
        what, place, *text = seam.splitlines()
        place, *versions = place.split()
        limits = dict(zip(versions[::2], versions[1::2], strict=True))
        yield Seam(what, place, "\n".join(line[4:] for line in text), **limits)


# Logger, which is a module -> what it logs.
_LOGGED = (*log_lines.FAILED_START.items(), *log_lines.WRONG_CPU_WARNINGS.items())
_LOGGED += (
    (log_lines.WORKER, log_lines.FAILED_CALL),
    ("vllm.v1.engine.utils", log_lines.ENGINE_FAILED),
)
SEAMS = [
    *(seam for file in sorted(Path(__file__).parent.glob("*.txt")) for seam in read_seams(file)),
    *(Seam(f"vLLM logs: {text}", logger.removeprefix("vllm."), text) for logger, text in _LOGGED),
]

SIGNATURES = {
    "v1.core.sched.diffusion_scheduler:diffusion_canvas_width": "request canvas_length",
    "v1.engine.async_llm:AsyncLLM.abort": "self request_id internal",
    "v1.structured_output:StructuredOutputManager._get_constraint_bounds": (
        "self request spec_tokens spec_tokens_committed"
    ),
    "v1.structured_output:StructuredOutputManager._get_reasoner": "self request",
    "v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs": (
        "self logits_fn hidden_states input_batch all_token_ids num_computed_tokens prompt_lens"
    ),
}
"""Parameters of functions that we call, by place. Those of functions that we replace are in
`patches`; overridden methods are compared with ours."""
