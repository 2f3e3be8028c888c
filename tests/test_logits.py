"""Logits, position by position: the same in all versions, and those of Transformers."""
import numpy as np
import pytest

import gpt2_v1
import gpt2_v2_padding
import gpt2_v3_kvcache
import gpt2_v4_prealloc
from gpt2_v2_padding import pad_batch
from helpers import (logits_in_chunks, make_hparams, new_caches, positions, random_params,
                     random_tensors, to_params, visible)
from test_generate import PROMPTS, TINY_PROMPTS

CACHED = [gpt2_v3_kvcache, gpt2_v4_prealloc]
CHUNKS = [[10], [4, 3, 1, 1, 1], [1] * 10, [9, 1], [1, 9]]   # prefix + chunk + single tokens
HPARAMS = make_hparams()


@pytest.fixture(scope="module")
def params():
    return random_params(HPARAMS)


def assert_close(actual, expected):
    """Within 1e-5 of the scale of the logits, which is what float32 rounding leaves."""
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def real_positions(batch, logits):
    """The logits of each row's real tokens, [length, V] each."""
    return [row[mask == 1] for row, mask in zip(logits, batch[1])]


def test_padded_rows_are_the_prompts_alone(params):
    batch = pad_batch(PROMPTS)
    logits = gpt2_v2_padding.gpt2(*batch, **params, n_head=4)
    for prompt, actual in zip(PROMPTS, real_positions(batch, logits)):
        assert_close(actual, gpt2_v1.gpt2(prompt, **params, n_head=4))


@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
@pytest.mark.parametrize("module", CACHED)
def test_in_chunks_through_one_cache(module, sizes, params):
    batch = pad_batch(PROMPTS)
    logits = logits_in_chunks(module, *batch, params, 4, sizes)
    for prompt, actual in zip(PROMPTS, real_positions(batch, logits)):
        assert_close(actual, gpt2_v1.gpt2(prompt, **params, n_head=4))


@pytest.mark.parametrize("module", CACHED)
def test_bundled_model_in_chunks(module, tiny):
    _, hparams, params = tiny
    batch = pad_batch(TINY_PROMPTS)
    logits = logits_in_chunks(module, *batch, params, hparams["n_head"], [5, 4, 1, 1, 1])
    for prompt, actual in zip(TINY_PROMPTS, real_positions(batch, logits)):
        assert_close(actual, gpt2_v1.gpt2(prompt, **params, n_head=hparams["n_head"]))


@pytest.mark.parametrize("module", CACHED)
def test_without_a_cache(module, params):
    input_ids, attention_mask = pad_batch(PROMPTS)
    logits = module.gpt2(input_ids, positions(attention_mask), visible(attention_mask, 0, 10), None,
                         **params, n_head=4)
    assert_close(logits, gpt2_v2_padding.gpt2(input_ids, attention_mask, **params, n_head=4))


@pytest.mark.parametrize("module", CACHED)
def test_mha_without_a_cache_is_the_uncached_one(module, params):
    x = np.random.RandomState(1).randn(3, 10, 32).astype(np.float32)
    mask = visible(pad_batch(PROMPTS)[1], 0, 10)
    attn = params["blocks"][0]["attn"]
    expected = gpt2_v2_padding.mha(x, **attn, n_head=4, mask=mask)
    np.testing.assert_array_equal(module.mha(x, **attn, n_head=4, mask=mask), expected)


@pytest.mark.parametrize("dtype", [np.int64, bool, np.float64])
def test_float32_whatever_the_mask(dtype, params):
    input_ids, attention_mask = pad_batch(PROMPTS)
    expected = gpt2_v2_padding.gpt2(input_ids, attention_mask, **params, n_head=4)
    assert_close(gpt2_v2_padding.gpt2(input_ids, attention_mask.astype(dtype), **params, n_head=4),
                 expected)


@pytest.mark.parametrize("keep", [2, 12])
def test_logits_to_keep(keep, params):
    """The last ones, or all, if there are fewer: the prompts have up to 10 tokens."""
    batch, options = pad_batch(PROMPTS), {"n_head": 4, "logits_to_keep": keep}
    whole = gpt2_v2_padding.gpt2(*batch, **params, n_head=4)
    assert_close(gpt2_v2_padding.gpt2(*batch, **params, **options), whole[:, -keep:])
    for module in CACHED:
        caches, mask = new_caches(module, params, 3, 4, 10), visible(batch[1], 0, 10)
        kept = module.gpt2(batch[0], positions(batch[1]), mask, caches, **params, **options)
        assert_close(kept, whole[:, -keep:])
    whole = gpt2_v1.gpt2(PROMPTS[0], **params, n_head=4)
    assert_close(gpt2_v1.gpt2(PROMPTS[0], **params, **options), whole[-keep:])


@pytest.mark.parametrize("module", CACHED)
def test_logits_to_keep_with_one_mask_for_all_queries(module, params):
    input_ids, attention_mask = pad_batch(PROMPTS)
    arguments = (input_ids, positions(attention_mask),
                 visible(attention_mask, 0, 10)[:, :, -1:], None)  # [B, 1, 1, S]
    whole = module.gpt2(*arguments, **params, n_head=4)
    assert_close(module.gpt2(*arguments, **params, n_head=4, logits_to_keep=2), whole[:, -2:])


class Weight(np.ndarray):
    """A weight that notes the shape of whatever it is matrix-multiplied with."""

    shapes = []

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if ufunc is np.matmul:
            self.shapes.append(inputs[0].shape)
        return getattr(ufunc, method)(*[np.asarray(x) for x in inputs], **options)


def params_of_weights():
    """The params of a random model, as Weights that have noted nothing yet."""
    Weight.shapes.clear()
    return to_params({name: tensor.view(Weight)
                      for name, tensor in random_tensors(HPARAMS).items()})


@pytest.mark.parametrize("module", [gpt2_v2_padding, *CACHED])
def test_one_matrix_product_for_a_batch(module):
    """Each weight is read once, for all B * T rows; the unembedding, for the B that are needed."""
    module.generate(*pad_batch(PROMPTS), params_of_weights(), 4, 1)
    assert Weight.shapes == [
        (30, 32), (30, 32), (30, 32), (30, 128),  # c_attn, c_proj, c_fc, c_proj
        (30, 32), (30, 32), (30, 32), (30, 128),
        (3, 32)]                                  # unembedding


def test_matrix_products_of_version_1():
    """The unembedding is for the position whose logits are needed."""
    gpt2_v1.generate(list(range(10)), params_of_weights(), 4, 1)
    assert Weight.shapes == [
        (10, 32), (10, 32), (10, 32), (10, 128),  # c_attn, c_proj, c_fc, c_proj
        (10, 32), (10, 32), (10, 32), (10, 128),
        (1, 32)]                                  # unembedding


# Expected values from Transformers' GPT2LMHeadModel in float32, made by
# tests/data/make_references.py.
def all_logits(prompts, params, n_head):
    """{version: the logits of each prompt's real tokens}."""
    batch = pad_batch(prompts)
    chunks = [batch[0].shape[1] - 2, 1, 1]
    logits = {"v1": [gpt2_v1.gpt2(prompt, **params, n_head=n_head) for prompt in prompts],
              "v2": real_positions(batch, gpt2_v2_padding.gpt2(*batch, **params, n_head=n_head))}
    for name, module in zip(("v3", "v4"), CACHED):
        cached = logits_in_chunks(module, *batch, params, n_head, chunks)
        logits[name] = real_positions(batch, cached)
    return logits


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_transformers_random_model(version, params, reference):
    actual = all_logits(PROMPTS, params, 4)[version]
    expected = real_positions(pad_batch(PROMPTS), reference["logits"])
    for ours, theirs in zip(actual, expected):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_transformers_bundled_model(version, tiny, reference):
    _, hparams, params = tiny
    actual = all_logits(TINY_PROMPTS, params, hparams["n_head"])[version]
    expected = real_positions(pad_batch(TINY_PROMPTS), reference["tiny_logits"])
    for ours, theirs in zip(actual, expected):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
