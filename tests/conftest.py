import os
import sys
from pathlib import Path

# before NumPy starts: on models this small, BLAS threads mostly wait for each other
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))                     # so that pytest runs from any folder
sys.path.insert(0, str(ROOT / "tests"))

import utils  # noqa: E402


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch, tmp_path_factory):
    """Nothing but this machine is asked for models: by default port 9, where nobody answers.

    Nor is anything taken from this machine's cache of the Hub.
    """
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in "NO_PROXY", "no_proxy":
        monkeypatch.setenv(name, "127.0.0.1")
    for name in "HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path_factory.getbasetemp() / "no cache"))


@pytest.fixture(scope="session")
def tiny():
    """(encoder, hparams, params) of the bundled model."""
    return utils.load_encoder_hparams_and_params("tiny")


@pytest.fixture(scope="session")
def reference():
    """What Hugging Face Transformers computed; tests/data/make_references.py says how."""
    return np.load(ROOT / "tests" / "data" / "transformers.npz")
