"""Draw masks.png: the attention mask of prefill, a square, and those of decode, a row each.

    python docs/masks.py

The masks are those that gpt2_v3_kvcache.generate makes for a row of the batch with two columns of
padding. Needs matplotlib.
"""
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import gpt2_v3_kvcache as v3  # noqa: E402
import utils  # noqa: E402

_, hparams, params = utils.load_encoder_hparams_and_params("tiny")
masks, gpt2 = [], v3.gpt2


def noting(input_ids, pos_ids, mask, *args, **kwargs):
    masks.append(mask[-1, 0] == 0)                # the row with padding: [T, S], True: may attend
    return gpt2(input_ids, pos_ids, mask, *args, **kwargs)


v3.gpt2 = noting
v3.generate(*v3.pad_batch([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]), params, hparams["n_head"], 4)

S = masks[-1].shape[1]
figure, axes = plt.subplots(len(masks), 1, figsize=(5.4, 5.4), layout="constrained",
                            height_ratios=[len(mask) for mask in masks])
names = ["prefill"] + [f"decode {n}" for n in range(1, len(masks))]
tokens = ["pad", "pad", *(f"t{n}" for n in range(1, S - 1))]
for axis, mask, name in zip(axes, masks, names):
    rows, columns = mask.shape
    padded = np.full((rows, S), np.nan)
    padded[:, :columns] = mask
    axis.pcolormesh(padded, cmap="Blues", vmin=-0.15, vmax=1.4, edgecolors="white", linewidth=2)
    axis.set(xlim=(0, S), ylim=(rows, 0), aspect="equal", frame_on=False, xticks=[])
    axis.set_yticks(np.arange(rows) + 0.5, tokens[columns - rows:columns])
    axis.tick_params(length=0)
    axis.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=16)
axes[0].set_xticks(np.arange(S) + 0.5, tokens)
axes[0].xaxis.tick_top()
axes[0].set_title("rows: queries, columns: keys; dark: attended to")
figure.savefig(HERE / "masks.png", dpi=120)
