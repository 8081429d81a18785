"""The small checkpoint that comes with the package, in a wheel as in a clone.

The folder beside this file is a link to the clone's `checkpoints/`.
"""

import json
from pathlib import Path

SHIPPED_CHECKPOINT = Path(__file__).parent / "diffusiongemma-tiny"


def print_folder() -> None:
    """Prints the folder of the shipped checkpoint: `vllm-dllm checkpoint`."""
    print(SHIPPED_CHECKPOINT)


def read_serving_note(checkpoint: Path) -> str | None:
    """Returns what a checkpoint's config.json tells people who serve it, or None."""
    return json.loads((checkpoint / "config.json").read_text()).get("serving_note")
