"""benchmark.py: what it counts and computes; its times are not tested."""
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest

import benchmark
import gpt2_v4_prealloc
from conftest import ROOT
from helpers import make_hparams, random_tensors, to_params, write_model
from test_logits import HPARAMS, Weight


def run(*arguments, env=None):
    return subprocess.run([sys.executable, str(ROOT / "benchmark.py"), *arguments],
                          capture_output=True, text=True, timeout=60, env=env)


@pytest.fixture(scope="module")
def model():
    options = types.SimpleNamespace(random=None, model="tiny", models_dir=ROOT / "models")
    return benchmark.Model(options)


@pytest.mark.parametrize("T, n, uncached, cached", [(10, 20, 390, 29), (3, 3, 12, 5)])
def test_positions(model, T, n, uncached, cached):
    """10 + 11 + ... + 29 is 390, 10 + 19 is 29; 3 + 4 + 5 is 12, 3 + 2 is 5. In each row."""
    for batch in 1, 2:
        positions = [model.generate(module, model.prompts(batch, T), n)[2]
                     for module in benchmark.VERSIONS.values()]
        assert positions == [batch * uncached, batch * cached, batch * cached]


@pytest.mark.parametrize("version", benchmark.VERSIONS)
def test_a_time_for_each_token(model, version):
    """And the tokens that the script itself generates."""
    module = benchmark.VERSIONS[version]
    batch = model.prompts(2, 5)
    expected = module.generate(*batch, model.params, model.n_head, 4)
    ids, seconds, _ = model.generate(module, batch, 4)
    assert ids.tolist() == expected.tolist()
    assert len(seconds) == 4 and min(seconds) > 0


@pytest.mark.parametrize("B, T", [(1, 10), (3, 10), (3, 1)])
def test_floor(B, T):
    """The products with weights that version 4 computes for one new token, and nothing else."""
    tensors = random_tensors(HPARAMS)
    params = to_params({name: tensor.view(Weight) for name, tensor in tensors.items()})
    Weight.shapes.clear()
    gpt2_v4_prealloc.generate(np.zeros((B, T), dtype=np.int64), np.ones((B, T)), params, 4, 1)
    computed = Weight.shapes.copy()
    Weight.shapes.clear()
    benchmark.floor_seconds(types.SimpleNamespace(params=params, n_embd=32), B * T, B)
    assert Weight.shapes == computed


@pytest.mark.parametrize("wanted", ["", "0", "1", "two", "99999"])
def test_threads(wanted):
    """At least one, and no more than there are CPUs, since OpenBLAS starts no more."""
    result = run("memory", env={**os.environ, "OPENBLAS_NUM_THREADS": wanted})
    threads = int(re.search(r"(\d+) threads;", result.stdout).group(1))
    assert 1 <= threads <= (1 if wanted == "1" else os.cpu_count()), result.stderr


def test_a_prompt_as_long_as_the_context():
    """There is one new token then, and no decode step to warm up with."""
    result = run("cache", "--prompt", "512", "--runs", "1")
    assert result.returncode == 0, result.stderr
    assert [line[:9] for line in result.stdout.splitlines()[-4:-1]] == [
        "| 1 | v2 ", "| 1 | v3 ", "| 1 | v4 "]


def test_memory():
    """2 * 12 layers * 1,024 positions * 768 * 4 bytes is 75,497,472, and so on."""
    result = run("memory")
    assert result.returncode == 0, result.stderr
    assert "| GPT-2 124M | 1 | 75,497,472 | 75,497,472 | 72 |" in result.stdout
    assert "| GPT-2 124M | 8 | 603,979,776 | 603,979,776 | 576 |" in result.stdout
    # KiB a token, then MiB at 128, 512, 1,024, 2,048, 8,192 and 32,768 tokens
    assert "| Qwen3-0.6B | 112 | 14 | 56 | 112 | 224 | 896 | 3,584 |" in result.stdout
    assert "| Llama 3 8B | 128 | 16 | 64 | 128 | 256 | 1,024 |  |" in result.stdout


def test_a_context_too_short_to_measure(tmp_path):
    """16 are enough for cache, after a prompt of 10, but not for steps."""
    hparams = make_hparams(n_vocab=257, n_ctx=16)
    write_model(tmp_path / "short", hparams, random_tensors(hparams))
    arguments = "--model", "short", "--models_dir", str(tmp_path), "--runs", "1"
    result = run("steps", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "19 tokens" in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr
    assert run("cache", *arguments).returncode == 0


def test_what_is_not_there():
    for arguments, says in [(["peers"], "pip install"), (["steps", "--plot"], "pip install"),
                            (["cache", "--model", "124N"], "'124N'"), (["nothing"], "nothing"),
                            (["cache", "--prompt", "513"],
                             "takes 513 tokens here, more than the model's context of 512"),
                            (["cache", "--model", "tiny", "--random", "124M"], "not allowed"),
                            (["concat", "--plot"], "steps and memory")]:
        result = subprocess.run(
            [sys.executable, "-c", "import sys; sys.modules.update(dict.fromkeys(["
             "'torch', 'transformers', 'ctranslate2', 'matplotlib']));"
             "import benchmark; benchmark.main()", *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 2 and says in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr and result.stdout == ""
