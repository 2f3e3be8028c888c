"""Draw the pictures of benchmark.py's --plot. Needs matplotlib.

OSError if a picture can't be written.
"""
import sys
from pathlib import Path

import numpy as np
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


def draw_errors(title, errors):
    """errors: {(format, what has a scale): the error of the logits at each step}."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    for (dtype, scales), values in errors.items():
        smooth = np.convolve(values, np.full(25, 1 / 25), "valid")
        axis.plot(np.arange(len(smooth)) + 25, 100 * smooth, "-" if scales == "position" else "--",
                  color={"fp8": "tab:red", "int8": "tab:blue"}[dtype],
                  label=f"{dtype}, a scale for each {scales}")
    axis.set(xlabel="decode step", ylabel="error of the logits in %, mean of 25 steps", ylim=0)
    axis.set_title(title)
    axis.legend()
    save(figure, "quantized.png")


def draw_requests(title, reserved, taken, held):
    """Bytes that a padded batch reserves, and that pages take and hold in each pass."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    axis.axhline(reserved / 2**20, color="tab:orange", label="version 4: reserved throughout")
    axis.plot(np.array(taken) / 2**20, color="tab:blue", label="pages: allocated")
    axis.plot(np.array(held) / 2**20, ":", color="black", label="pages: used")
    axis.set(xlabel="pass", ylabel="MiB of cache for eight requests", ylim=0)
    axis.set_title(title)
    axis.legend()
    save(figure, "paged.png")


def save(figure, name):
    path = Path(__file__).resolve().parent / name
    figure.savefig(path, dpi=120)
    print(f"wrote {path}", file=sys.stderr)
