"""The small checkpoint that comes with the package, in a wheel as in a clone."""

import json
from pathlib import Path

SHIPPED_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "diffusiongemma-tiny"


def serving_note(checkpoint: Path) -> str | None:
    """What a checkpoint's config.json tells those who serve it, if anything."""
    return json.loads((checkpoint / "config.json").read_text()).get("serving_note")
