"""The KVCache of v4, line by line of its protocol; and what caching costs and saves, counted."""
import numpy as np
import pytest

import gpt2_v1
import gpt2_v2_padding
import gpt2_v3_kvcache
import gpt2_v4_prealloc
from benchmark import noting
from gpt2_v2_padding import pad_batch
from gpt2_v4_prealloc import KVCache, kv_cache_bytes
from helpers import (logits_in_chunks, make_hparams, new_caches, positions, random_params,
                     visible)

N_LAYER, B, H, CAPACITY, D = 2, 3, 4, 8, 5


@pytest.fixture
def cache():
    return KVCache(N_LAYER, B, H, CAPACITY, D)


def random_kv(T, seed=0, batch=B, n_head=H, head_dim=D):
    random = np.random.RandomState(seed)
    return [random.randn(batch, n_head, T, head_dim).astype(np.float32) for _ in "kv"]


def test_update_returns_the_whole_history(cache):
    k1, v1 = random_kv(3, seed=1)
    k2, v2 = random_kv(2, seed=2)
    for layer in range(N_LAYER):
        keys, values = cache.update(layer, k1 + layer, v1 + layer)
        np.testing.assert_array_equal(keys, k1 + layer)
        np.testing.assert_array_equal(values, v1 + layer)
    assert cache.length == 3
    for layer in range(N_LAYER):
        keys, values = cache.update(layer, k2 + layer, v2 + layer)
        np.testing.assert_array_equal(keys, np.concatenate([k1, k2], axis=2) + layer)
        np.testing.assert_array_equal(values, np.concatenate([v1, v2], axis=2) + layer)
    assert cache.length == 5


def test_update_returns_views_and_copies_no_history(cache):
    k, v = random_kv(1)
    first, _ = cache.update(0, k, v)
    second, values = cache.update(0, k, v)
    assert np.shares_memory(second, cache.keys[0]) and np.shares_memory(first, second)
    assert np.shares_memory(values, cache.values[0])
    assert not np.shares_memory(second, k)


def test_capacity(cache):
    cache.update(0, *random_kv(CAPACITY))
    cache.update(1, *random_kv(CAPACITY))
    assert cache.length == CAPACITY
    with pytest.raises(ValueError, match="capacity of 8"):
        cache.update(0, *random_kv(1))
    assert cache.length == CAPACITY


@pytest.mark.parametrize("k, v", [
    (random_kv(6)[0], random_kv(6)[1]),                                     # 3 + 6 > 8
    (random_kv(1, batch=2)[0], random_kv(1, batch=2)[1]),
    (random_kv(1, batch=1)[0], random_kv(1, batch=1)[1]),                   # would broadcast
    (random_kv(1, n_head=2)[0], random_kv(1, n_head=2)[1]),
    (random_kv(1, n_head=1)[0], random_kv(1, n_head=1)[1]),                 # would broadcast
    (random_kv(1, head_dim=4)[0], random_kv(1, head_dim=4)[1]),
    (random_kv(1, head_dim=1)[0], random_kv(1, head_dim=1)[1]),             # would broadcast
    (random_kv(1)[0], random_kv(2)[1]),
    (random_kv(1)[0], random_kv(1, head_dim=1)[1]),
    (random_kv(1)[0][0], random_kv(1)[1][0]),
    (random_kv(1)[0][0, 0], random_kv(1)[1][0, 0]),
])
def test_refusal_without_damage(cache, k, v):
    for layer in range(N_LAYER):
        cache.update(layer, *random_kv(3))
    cache.keys[:, :, :, 3:] = cache.values[:, :, :, 3:] = 7
    keys, values = cache.keys.copy(), cache.values.copy()
    for layer in range(N_LAYER):
        with pytest.raises(ValueError):
            cache.update(layer, k, v)
    np.testing.assert_array_equal(cache.keys, keys)
    np.testing.assert_array_equal(cache.values, values)
    assert cache.length == 3


def test_a_pass_that_stopped_part_way(cache):
    for layer in range(N_LAYER):
        cache.update(layer, *random_kv(3))
    cache.update(0, *random_kv(2))
    with pytest.raises(RuntimeError, match="part-way"):
        cache.length
    with pytest.raises(ValueError):
        cache.truncate(4)                         # layer 1 has but three
    cache.truncate(3)
    assert cache.length == 3
    cache.update(0, *random_kv(2))
    cache.reset()
    assert cache.length == 0


def test_truncate_forgets_without_copying(cache):
    k, v = random_kv(6)
    for layer in range(N_LAYER):
        cache.update(layer, k, v)
    buffers = cache.keys, cache.values
    cache.truncate(4)
    assert cache.length == 4
    assert cache.keys is buffers[0] and cache.values is buffers[1]
    new_k, new_v = random_kv(1, seed=1)
    keys, values = cache.update(0, new_k, new_v)
    np.testing.assert_array_equal(keys, np.concatenate([k[:, :, :4], new_k], axis=2))
    np.testing.assert_array_equal(values, np.concatenate([v[:, :, :4], new_v], axis=2))


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_refuses(cache, length):
    for layer in range(N_LAYER):
        cache.update(layer, *random_kv(3))
    with pytest.raises(ValueError):
        cache.truncate(length)
    assert cache.length == 3


def test_reset_reuses_the_buffers(cache):
    for layer in range(N_LAYER):
        cache.update(layer, *random_kv(8))
    cache.reset()
    assert cache.length == 0
    k, v = random_kv(2, seed=3)
    for layer in range(N_LAYER):
        keys, values = cache.update(layer, k, v)
        np.testing.assert_array_equal(keys, k)
        np.testing.assert_array_equal(values, v)
    assert cache.length == 2


def test_dtype():
    assert KVCache(1, 1, 1, 4, 2).keys.dtype == np.float32
    half = KVCache(1, 1, 1, 4, 2, dtype=np.float16)
    assert half.nbytes == kv_cache_bytes(1, 1, 4, 1, 2, bytes_per_value=2)
    assert half.update(0, *random_kv(1, batch=1, n_head=1, head_dim=2))[0].dtype == np.float16


def test_interrupted_model_and_rollback():
    """A pass that fails in a late layer is seen; truncate repairs the cache for the next one."""
    hparams = make_hparams(n_layer=3)
    params, n_head = random_params(hparams), hparams["n_head"]
    input_ids, attention_mask = pad_batch([[7, 3, 19, 1, 25, 8]])
    expected = gpt2_v2_padding.gpt2(input_ids, attention_mask, **params, n_head=n_head)
    pos_ids = positions(attention_mask)
    cache = new_caches(gpt2_v4_prealloc, params, 1, n_head, 6)

    def run(start, stop, params):
        return gpt2_v4_prealloc.gpt2(
            input_ids[:, start:stop], pos_ids[:, start:stop],
            visible(attention_mask, start, stop), cache, **params, n_head=n_head)

    run(0, 4, params)
    broken = {**params, "blocks": params["blocks"][:2] + [{}]}
    with pytest.raises(TypeError):
        run(4, 6, broken)
    with pytest.raises(RuntimeError):
        cache.length
    cache.truncate(4)
    logits = run(4, 6, params)
    np.testing.assert_allclose(logits, expected[:, 4:], rtol=0, atol=1e-5 * np.abs(expected).max())


def test_unfilled_slots_may_hold_anything(monkeypatch):
    hparams = make_hparams()
    params = random_params(hparams)
    batch = pad_batch([[7, 3, 19, 1, 25, 8, 11, 4], [9, 2]])
    expected = logits_in_chunks(gpt2_v4_prealloc, *batch, params, 4, [5, 2, 1])

    class Poisoned(KVCache):
        def __init__(self, *shape):
            super().__init__(*shape)
            self.keys[:] = np.nan
            self.values[:] = np.inf

    monkeypatch.setattr(gpt2_v4_prealloc, "KVCache", Poisoned)
    actual = logits_in_chunks(gpt2_v4_prealloc, *batch, params, 4, [5, 2, 1])
    np.testing.assert_array_equal(actual, expected)


# The figures are those of the source texts: a blog post on the KV cache of GPT-2, and a book
# chapter and a lesson that work out Qwen3-0.6B and Llama 3 8B.
KIB, MIB, GIB = 1024, 1024 ** 2, 1024 ** 3


@pytest.mark.parametrize("sizes, expected", [
    ((12, 1, 1024, 12, 64, 4), 75_497_472),       # GPT-2 small, its whole context
    ((12, 8, 1024, 12, 64, 4), 603_979_776),
    ((28, 1, 1, 8, 128, 2), 112 * KIB),           # Qwen3-0.6B
    ((28, 1, 2048, 8, 128, 2), 224 * MIB),
    ((28, 1, 32 * 1024, 8, 128, 2), 3.5 * GIB),
    ((32, 1, 1, 8, 128, 2), 128 * KIB),           # Llama 3 8B
    ((32, 1, 8192, 8, 128, 2), GIB),
])
def test_kv_cache_bytes(sizes, expected):
    assert kv_cache_bytes(*sizes) == expected


def test_nbytes_is_what_is_allocated():
    cache = KVCache(12, 1, 12, 1024, 64)          # GPT-2 small
    assert cache.nbytes == 75_497_472 == kv_cache_bytes(12, 1, 1024, 12, 64)
    assert cache.nbytes == cache.keys.nbytes + cache.values.nbytes


@pytest.mark.parametrize("module, counts", [
    (gpt2_v1, (390, 12)), (gpt2_v2_padding, (390, 12)),
    (gpt2_v3_kvcache, (29, 5)), (gpt2_v4_prealloc, (29, 5))])
def test_positions_through_the_model(module, counts, monkeypatch):
    """10 + ... + 29 = 390 uncached, 10 + 19 cached; and 3 + 4 + 5 = 12 against 3 + 1 + 1."""
    params = random_params(make_hparams())
    seen = []
    monkeypatch.setattr(module, "gpt2", noting(
        module.gpt2, lambda arguments, _: seen.append(np.size(arguments[0]))))
    for (n_prompt, n_new), count in zip([(10, 20), (3, 3)], counts):
        seen.clear()
        prompt = list(range(n_prompt))
        module.generate(*([prompt] if module is gpt2_v1 else pad_batch([prompt])), params, 4, n_new)
        assert sum(seen) == count


def test_generate_allocates_what_it_needs(monkeypatch):
    """v4: T + n - 1 positions, once, all of them filled in the end. v3 ends with the same bytes."""
    hparams = make_hparams()
    params = random_params(hparams)
    batch = pad_batch([[7, 3, 19], [9]])
    made = []

    class Noted(KVCache):
        def __init__(self, *shape):
            super().__init__(*shape)
            made.append(self)

    monkeypatch.setattr(gpt2_v4_prealloc, "KVCache", Noted)
    gpt2_v4_prealloc.generate(*batch, params, 4, 10)
    [cache] = made
    assert cache.length == cache.keys.shape[-2] == 3 + 10 - 1
    assert cache.nbytes == kv_cache_bytes(2, 2, 12, 4, 8)

    dicts = []
    monkeypatch.setattr(gpt2_v3_kvcache, "gpt2", noting(
        gpt2_v3_kvcache.gpt2, lambda arguments, _: dicts.append(arguments[3])))
    gpt2_v3_kvcache.generate(*batch, params, 4, 10)
    assert sum(layer[name].nbytes for layer in dicts[-1] for name in "kv") == cache.nbytes


def test_the_last_position_alone_is_unembedded(monkeypatch):
    for module in gpt2_v1, gpt2_v2_padding, gpt2_v3_kvcache, gpt2_v4_prealloc:
        kept = []
        monkeypatch.setattr(module, "gpt2", noting(
            module.gpt2, lambda _, logits, kept=kept: kept.append(logits.shape[-2])))
        prompt = [7, 3, 19]
        module.generate(*([prompt] if module is gpt2_v1 else pad_batch([prompt])),
                        random_params(make_hparams()), 4, 5)
        assert kept == [1] * 5


def test_entries_copied_on_the_way_to_8192_positions(monkeypatch):
    """Growing copies 1 + 2 + ... + 8191 = 33,550,336 entries, the 33.6 million of the sources."""
    random = np.random.RandomState(0)
    x = random.randn(1, 1, 1).astype(np.float32)
    c_attn = {"w": random.randn(1, 3).astype(np.float32), "b": np.zeros(3, np.float32)}
    c_proj = {"w": random.randn(1, 1).astype(np.float32), "b": np.zeros(1, np.float32)}
    copied = []
    layer_cache = {"k": None, "v": None}
    for module in gpt2_v3_kvcache, gpt2_v4_prealloc:
        monkeypatch.setattr(module, "attention", lambda q, k, v, mask: q)   # not what is counted
    for _ in range(8192):
        before = layer_cache["k"]
        gpt2_v3_kvcache.mha(x, c_attn, c_proj, 1, 0, layer_cache)
        if before is not None and not np.shares_memory(before, layer_cache["k"]):
            copied.append(before.shape[2])
    assert sum(copied) == 33_550_336

    cache = KVCache(1, 1, 1, 8192, 1)
    keys = cache.keys
    for _ in range(8192):
        gpt2_v4_prealloc.mha(x, c_attn, c_proj, 1, 0, cache, 0)
    assert cache.keys is keys and cache.length == 8192
