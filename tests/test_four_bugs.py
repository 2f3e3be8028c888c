"""Four bugs that catch almost everyone who builds a KV cache, and a check that catches each.

Every check runs on the scripts as they are, where it passes, and on scripts with the bug put in,
a line or two of them changed, where it has to fail.
"""
import types
from pathlib import Path

import numpy as np
import pytest

import gpt2_v2_padding
import gpt2_v3_kvcache
import gpt2_v4_prealloc
from gpt2_v2_padding import pad_batch
from helpers import make_hparams, random_params
from test_generate import PROMPTS

HPARAMS = make_hparams()
V2, V3, V4 = "gpt2_v2_padding", "gpt2_v3_kvcache", "gpt2_v4_prealloc"
SCRIPTS = {module.__name__: module for module in (gpt2_v2_padding, gpt2_v3_kvcache,
                                                  gpt2_v4_prealloc)}


def script_with(name, changes):
    """The script as a new module, with lines of its source changed."""
    source = Path(SCRIPTS[name].__file__).read_text(encoding="utf-8")
    for line, changed in changes.items():
        assert source.count(line) == 1, f"{name} has no such line any more: {line}"
        source = source.replace(line, changed)
    module = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def check_positions(module, reference):
    """Padded rows go on as the uncached version does, so decode has each row's own position."""
    batch, params = pad_batch(PROMPTS), random_params(HPARAMS)
    np.testing.assert_array_equal(
        module.generate(*batch, params, HPARAMS["n_head"], 20),
        gpt2_v2_padding.generate(*batch, params, HPARAMS["n_head"], 20))


def check_slots(module, reference):
    """What unfilled slots hold doesn't matter: NaN in one that is read would reach the logits."""
    class PoisonedCache(module.KVCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.keys[:] = self.values[:] = np.nan

    original, module.KVCache = module.KVCache, PoisonedCache
    try:
        check_positions(module, reference)
    finally:
        module.KVCache = original


def check_calls(module, reference):
    """A call goes as if there had been none before it."""
    params = random_params(HPARAMS)
    for prompts in PROMPTS, PROMPTS[::-1]:
        batch = pad_batch(prompts)
        np.testing.assert_array_equal(
            module.generate(*batch, params, HPARAMS["n_head"], 20),
            gpt2_v2_padding.generate(*batch, params, HPARAMS["n_head"], 20))


def check_heads(module, reference):
    """The tokens are those of Transformers, so its heads are ours."""
    np.testing.assert_array_equal(
        module.generate(*pad_batch(PROMPTS), random_params(HPARAMS), HPARAMS["n_head"], 20),
        reference["greedy"])


NEXT_POSITION = "pos_ids = pos_ids + 1"
SPLIT_HEADS = "reshape(B, T, 3, n_head, E // n_head)"
MERGE_HEADS = "x = x.transpose(0, 2, 1, 3).reshape(B, T, E)"
V3_CACHES = '[{"k": None, "v": None} for _ in params["blocks"]]'
V4_CACHES = "KVCache(n_layer, B, n_head, capacity, head_dim)"

BUGS = {
    "position 0": (check_positions, [V3, V4], {NEXT_POSITION: "pos_ids = pos_ids * 0"}),
    "position of the prompt's end": (check_positions, [V3, V4], {NEXT_POSITION: "pass"}),
    "position of the padded column in v3": (check_positions, [V3], {
        NEXT_POSITION: 'pos_ids = pos_ids * 0 + kv_caches[0]["k"].shape[2]'}),
    "position of the padded column in v4": (check_positions, [V4], {
        NEXT_POSITION: "pos_ids = pos_ids * 0 + kv_caches.length"}),
    "all slots are read in decode": (check_slots, [V4], {
        "return keys[:, :, :end], values[:, :, :end]":
            "return (keys, values) if start else (keys[:, :, :end], values[:, :, :end])",
        "padding[:, None, None, :kv_caches.length + 1]": "padding[:, None, None, :]"}),
    "v3 keeps its caches": (check_calls, [V3], {
        V3_CACHES: f"globals().setdefault('kept', {V3_CACHES})"}),
    "v4 keeps its cache": (check_calls, [V4], {
        V4_CACHES: f"globals().setdefault('kept' + str(input_ids.shape), {V4_CACHES})"}),
    "heads split before q, k and v": (check_heads, [V2, V3, V4], {
        SPLIT_HEADS: "reshape(B, T, n_head, 3, E // n_head).swapaxes(2, 3)"}),
    "heads split along the wrong axis": (check_heads, [V2, V3, V4], {
        SPLIT_HEADS: "reshape(B, T, 3, E // n_head, n_head).swapaxes(3, 4)"}),
    "heads merged along the wrong axis": (check_heads, [V2, V3, V4], {
        MERGE_HEADS: "x = x.reshape(B, T, E)"}),
}
CHECKS = {check: {name for c, names, _ in BUGS.values() if c is check for name in names}
          for check in (check_positions, check_slots, check_calls, check_heads)}


@pytest.mark.parametrize("check, name", [(check, name) for check, names in CHECKS.items()
                                         for name in sorted(names)])
def test_without_the_bug(check, name, reference):
    check(SCRIPTS[name], reference)


@pytest.mark.parametrize("bug, name", [(bug, name) for bug, (_, names, _) in BUGS.items()
                                       for name in names])
def test_the_bug_is_caught(bug, name, reference):
    check, _, changes = BUGS[bug]
    broken = script_with(name, changes)
    with pytest.raises((AssertionError, ValueError)):
        check(broken, reference)
