"""Write the expected values of tests/test_beyond.py that come from elsewhere: beyond.npz.

    python tests/data/make_beyond.py

It needs torch and transformers; the file was made with torch 2.13.0 and transformers 5.24.0.
"""
from pathlib import Path

import numpy as np
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

HERE = Path(__file__).resolve().parent
SETTINGS = [  # temperature, top_k, top_p
    (1.0, 0, 1.0), (0.7, 0, 1.0), (1.8, 0, 1.0), (0.01, 0, 1.0), (1.0, 1, 1.0), (1.0, 10, 1.0),
    (1.0, 1000, 1.0), (1.0, 0, 0.9), (1.0, 0, 0.5), (1.0, 0, 0.01), (0.7, 20, 0.9), (1.8, 5, 0.8),
    (1.3, 40, 0.95), (0.5, 7, 0.3),
]


def random_logits():
    """[5, 60] float32: flat and peaked, tokens ruled out; and [5, 10], full of equal ones.

    No more than 10 of these, because PyTorch puts equal ones in no certain order if there are many.
    """
    random = np.random.RandomState(0)
    logits = (random.randn(5, 60) * [[0.1], [1], [3], [10], [3]]).astype(np.float32)
    logits[4, ::3] = -np.inf
    ties = random.randint(0, 3, (5, 10)).astype(np.float32)
    ties[0] = 0                                       # 0.1 each: rounding decides in top-p
    return logits, ties


def warped(logits, temperature, top_k, top_p):
    """Transformers' probabilities, in generate's order, with its rules for what is off."""
    scores = torch.from_numpy(logits)
    if temperature != 1:
        scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k != 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(dim=-1).numpy()


def sweep():
    """Float32 values within FP8's range: all codes, the midpoints between them, and their sides."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    values = np.sort(codes[np.isfinite(codes)])
    middle = (values[1:] + values[:-1]) / 2
    random = np.random.RandomState(0)
    values = np.concatenate([values, middle, np.nextafter(middle, np.float32(np.inf)),
                             np.nextafter(middle, np.float32(-np.inf)), [-464, -460, 460, 464],
                             random.randn(500), 150 * random.randn(500), 1e-3 * random.randn(500)])
    return codes, np.clip(values, -464, 464).astype(np.float32)


def main():
    logits, ties = random_logits()
    codes, values = sweep()
    rounded = torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy()
    assert np.isfinite(rounded).all()
    np.savez_compressed(
        HERE / "beyond.npz", settings=np.array(SETTINGS), logits=logits, ties=ties,
        probabilities=np.array([warped(logits, *setting) for setting in SETTINGS]),
        tied_probabilities=np.array([warped(ties, *setting) for setting in SETTINGS]),
        e4m3=codes, values=values, rounded=rounded)


if __name__ == "__main__":
    main()
