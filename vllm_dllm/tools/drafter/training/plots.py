"""Loss and acceptance length over the steps of a training run, as pictures."""

from pathlib import Path
from typing import Any


def save_plots(log: list[dict[str, Any]], folder: Path) -> None:
    """Writes loss.png and tau.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [entry["step"] for entry in log]
    for name, keys, label in (
        ("loss.png", ("loss",), "weighted cross entropy (nats)"),
        ("tau.png", ("tau_held_out",), "tokens per verification, held out"),
    ):
        figure, axis = plt.subplots(figsize=(7, 4))
        for key in keys:
            axis.plot(steps, [entry[key] for entry in log])
        axis.set(xlabel="step", ylabel=label)
        figure.tight_layout()
        figure.savefig(folder / name, dpi=80)
        plt.close(figure)
