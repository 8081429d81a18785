"""The small checkpoint that comes with the package, in a wheel as in a clone.

The folder beside this file is a link to the clone's `checkpoints/`.
"""

import json
from pathlib import Path

SHIPPED_CHECKPOINT = Path(__file__).parent / "diffusiongemma-tiny"


def print_folder() -> None:
    """Prints the folder of the shipped checkpoint. Serves the command `vllm-dllm checkpoint`."""
    print(SHIPPED_CHECKPOINT)


def read_serving_note(checkpoint: Path) -> str | None:
    """Returns the note for people who serve a checkpoint, from its config.json, or None."""
    return json.loads((checkpoint / "config.json").read_text()).get("serving_note")
