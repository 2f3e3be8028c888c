"""The four scripts stay what they are: one outline, so that a diff shows the idea alone."""
import ast
import difflib

import pytest

from conftest import ROOT

OUTLINE = ["gelu", "softmax", "layer_norm", "linear", "ffn", "attention", "mha",
           "transformer_block", "gpt2", "generate", "main"]
SCRIPTS = {
    "gpt2_v1.py": OUTLINE,
    "gpt2_v2_padding.py": OUTLINE[:9] + ["pad_batch"] + OUTLINE[9:],
    "gpt2_v3_kvcache.py": OUTLINE[:9] + ["pad_batch"] + OUTLINE[9:],
    "gpt2_v4_prealloc.py": OUTLINE[:6] + ["kv_cache_bytes", "KVCache"] + OUTLINE[6:9]
                           + ["pad_batch"] + OUTLINE[9:],
}


def parse(script):
    return ast.parse((ROOT / script).read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_outline(script):
    names = [node.name for node in parse(script).body if hasattr(node, "name")]
    assert names == SCRIPTS[script]


@pytest.mark.parametrize("script", SCRIPTS)
def test_standalone(script):
    imported = [alias.name for node in ast.walk(parse(script))
                if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    assert imported == ["utils", "math", "numpy", "tqdm"]


@pytest.mark.parametrize("before, after, limit", [
    ("gpt2_v1.py", "gpt2_v2_padding.py", 87), ("gpt2_v2_padding.py", "gpt2_v3_kvcache.py", 69),
    ("gpt2_v3_kvcache.py", "gpt2_v4_prealloc.py", 100)])
def test_size_of_a_diff(before, after, limit):
    """Lines added and removed. Of the last 100, most are the KVCache."""
    texts = [(ROOT / script).read_text(encoding="utf-8").splitlines() for script in (before, after)]
    changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    assert len(changed) <= limit


def test_ci_runs_the_command_of_the_readme():
    """Word for word."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [command] = [line for line in readme.splitlines() if line.endswith("-m pytest")]
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
