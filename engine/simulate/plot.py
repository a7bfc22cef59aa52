"""Queues and memory of a simulation over time, as a PNG or SVG file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engine.simulate.tally import FINISHED, Tally
from engine.simulate.timeline import SERIES

KINDS = (".png", ".svg")
COLOURS = {"running": "tab:green", "swapped": "tab:orange", "waiting": "tab:blue"}


def check_plot(path: str) -> None:
    """Before a long run: raises ValueError when no plot could be written to this file."""
    if Path(path).suffix.lower() not in KINDS:
        raise ValueError(f"--plot is {path!r}; its name must end in {' or '.join(KINDS)}")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--plot is {path!r}; there is no such directory")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'lawful[plot]'")


def plot(tally: Tally, path: str, title: str) -> None:
    """Two panels over simulated seconds: groups in each queue, and the used part of both pools.

    Equal tallies give equal SVG files.
    """
    import matplotlib
    from matplotlib.figure import Figure

    points = tally.timeline.points()
    at = [point.at for point in points]
    figure = Figure(figsize=(10, 6), layout="constrained")
    queues, memory = figure.subplots(2, 1, sharex=True)
    for name, colour in COLOURS.items():
        values = [point.values[SERIES.index(name)] for point in points]
        queues.plot(at, values, label=name, color=colour, linewidth=1)
    pools = (
        ("gpu_blocks_used", tally.config.num_gpu_blocks, "GPU", "tab:green"),
        ("cpu_blocks_used", tally.config.num_cpu_blocks, "CPU", "tab:orange"),
    )
    for name, capacity, label, colour in pools:
        if capacity:
            used = [100 * point.values[SERIES.index(name)] / capacity for point in points]
            memory.plot(at, used, label=f"{label}, {capacity:,} blocks", color=colour, linewidth=1)
    if tally.outcome != FINISHED:
        for panel in (queues, memory):
            panel.axvline(tally.ended, color="tab:red", linestyle="--", linewidth=1)
        queues.text(
            tally.ended, 1, f" {tally.outcome}", color="tab:red", va="top", transform=queues.get_xaxis_transform()
        )
    queues.set(ylabel="requests", title=title)
    memory.set(ylabel="% of the pool", xlabel="simulated seconds", ylim=(0, 105))
    for panel in (queues, memory):
        panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
        panel.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": "lawful", "svg.fonttype": "none"}):  # equal inputs, equal files
        metadata = {"Date": None} if path.lower().endswith(".svg") else {"Software": "lawful"}
        figure.savefig(path, dpi=120, metadata=metadata)
