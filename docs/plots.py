"""Draw steps.png and memory.png, for benchmark.py steps --plot and memory --plot. Needs matplotlib.

OSError if a picture can't be written.
"""
import sys
from pathlib import Path

from matplotlib.figure import Figure

COLORS = {"v2": "tab:red", "v3": "tab:orange", "v4": "tab:blue"}


def draw_steps(title, positions, milliseconds):
    """milliseconds: {version: those of one decode step at each of the positions}."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    figure.suptitle(title)
    for axis, versions in zip(figure.subplots(1, 2), (["v2", "v3", "v4"], ["v3", "v4"])):
        for version in versions:
            axis.plot(positions, milliseconds[version], "o-", color=COLORS[version], label=version)
        axis.set(xlabel="position", ylabel="milliseconds for one decode step", ylim=0)
        axis.legend()
    save(figure, "steps.png")


def draw_memory(sizes):
    """sizes: {model: {a length in tokens: the MiB of its cache}}."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    for model, mib in sizes.items():
        axis.plot(list(mib), list(mib.values()), "o-",
                  label=f"{model}, {'float32' if model.startswith('GPT-2') else '16 bits'}")
    axis.set(xlabel="context, in tokens", ylabel="MiB of cache for one sequence")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend()
    save(figure, "memory.png")


def save(figure, name):
    path = Path(__file__).resolve().parent / name
    figure.savefig(path, dpi=120)
    print(f"wrote {path}", file=sys.stderr)
