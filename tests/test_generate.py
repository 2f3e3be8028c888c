"""The four versions write the same tokens, alone and in padded batches."""
import numpy as np
import pytest

import gpt2_v1
import gpt2_v2_padding
import gpt2_v3_kvcache
import gpt2_v4_prealloc
from benchmark import noting
from gpt2_v2_padding import pad_batch
from helpers import make_hparams, random_params

BATCHED = [gpt2_v2_padding, gpt2_v3_kvcache, gpt2_v4_prealloc]
PROMPTS = [[7, 3, 19, 1, 25, 8, 11, 4, 2, 15], [9, 2], [1, 6, 4, 22]]  # of the source article
TINY_PROMPTS = [[502, 11, 263, 900, 5, 77, 1024, 2047, 301, 64, 8, 1999], [31, 7], [640, 641, 642]]
SHAPES = [
    make_hparams(n_ctx=109),                      # 109 = 10 + 100 - 1: to the last position
    make_hparams(n_ctx=39, n_head=1),
    make_hparams(n_ctx=39, n_head=32),            # head_dim 1
    make_hparams(n_ctx=39, n_layer=1),
    make_hparams(n_ctx=50, n_embd=30, n_head=5, n_layer=3, n_vocab=50),  # not to the last one
]


def four_ways(prompts, params, n_head, n):
    """One [B, n] for each version; v1 takes the prompts one by one."""
    one_by_one = [gpt2_v1.generate(prompt, params, n_head, n) for prompt in prompts]
    batch = pad_batch(prompts)
    return [np.array(one_by_one)] + [m.generate(*batch, params, n_head, n) for m in BATCHED]


@pytest.mark.parametrize("hparams", SHAPES, ids=str)
def test_random_models(hparams):
    params, n_head = random_params(hparams), hparams["n_head"]
    n = 100 if hparams["n_ctx"] > 100 else 30
    expected, *others = four_ways(PROMPTS, params, n_head, n)
    assert expected.shape == (3, n)
    assert len(np.unique(expected)) > 3           # the tokens do differ
    for actual in others:
        np.testing.assert_array_equal(actual, expected)


def test_bundled_model(tiny):
    encoder, hparams, params = tiny
    prompts = [encoder.encode(text) for text in
               ("Once upon a time", "The old woman said to the boy, ", "In the forest")]
    expected, *others = four_ways(prompts, params, hparams["n_head"], 20)
    for actual in others:
        np.testing.assert_array_equal(actual, expected)


def test_bundled_model_to_the_last_position(tiny):
    _, hparams, params = tiny
    prompt = np.random.RandomState(0).randint(0, hparams["n_vocab"], hparams["n_ctx"] - 1).tolist()
    prompts = [prompt, prompt[-5:]]               # 511 + 2 - 1 = 512
    expected, *others = four_ways(prompts, params, hparams["n_head"], 2)
    for actual in others:
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("T", [255, 256, 257, 512, 513])
def test_prompts_around_the_ends_of_chunks(T):
    """Prefill with a cache takes 256 positions at a time; a row may be all padding in the first."""
    hparams = make_hparams(n_ctx=520)
    params = random_params(hparams)
    prompt = np.random.RandomState(0).randint(0, hparams["n_vocab"], T).tolist()
    expected, *others = four_ways([prompt, prompt[:3]], params, hparams["n_head"], 3)
    for actual in others:
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("module", BATCHED)
def test_greedy_tokens_of_transformers(module, reference, tiny):
    """Made by tests/data/make_references.py, from the same prompts."""
    hparams = make_hparams()
    actual = module.generate(*pad_batch(PROMPTS), random_params(hparams), hparams["n_head"], 20)
    np.testing.assert_array_equal(actual, reference["greedy"])
    _, hparams, params = tiny
    actual = module.generate(*pad_batch(TINY_PROMPTS), params, hparams["n_head"], 20)
    np.testing.assert_array_equal(actual, reference["tiny_greedy"])


@pytest.mark.parametrize("module", BATCHED)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, bool, np.float64])
def test_attention_mask_of_any_dtype(module, dtype, monkeypatch):
    """The same tokens, by way of float32 logits."""
    hparams, dtypes = make_hparams(), set()
    params = random_params(hparams)
    input_ids, attention_mask = pad_batch(PROMPTS)
    expected = module.generate(input_ids, attention_mask, params, hparams["n_head"], 20)
    monkeypatch.setattr(module, "gpt2", noting(
        module.gpt2, lambda _, logits: dtypes.add(logits.dtype)))
    actual = module.generate(input_ids, attention_mask.astype(dtype), params, hparams["n_head"], 20)
    np.testing.assert_array_equal(actual, expected)
    assert dtypes == {np.dtype(np.float32)}


@pytest.mark.parametrize("module", [gpt2_v1, *BATCHED])
def test_arguments_stay_as_they_were(module):
    hparams = make_hparams()
    params = random_params(hparams)
    arguments = [list(PROMPTS[0])] if module is gpt2_v1 else list(pad_batch(PROMPTS))
    before = [np.array(argument) for argument in arguments]
    weights = params["wte"].copy(), params["blocks"][0]["attn"]["c_attn"]["w"].copy()
    module.generate(*arguments, params, hparams["n_head"], 5)
    for argument, copy in zip(arguments, before):
        np.testing.assert_array_equal(argument, copy)
    np.testing.assert_array_equal(params["wte"], weights[0])
    np.testing.assert_array_equal(params["blocks"][0]["attn"]["c_attn"]["w"], weights[1])


@pytest.mark.parametrize("module", [gpt2_v1, *BATCHED])
@pytest.mark.parametrize("n_prompt, n_new", [(10, 56), (64, 2), (65, 1), (3, 0), (3, -1)])
def test_what_does_not_fit_is_refused(module, n_prompt, n_new):
    hparams = make_hparams(n_ctx=64)              # T + n - 1 <= 64
    params = random_params(hparams)
    prompt = [1] * n_prompt
    arguments = [prompt] if module is gpt2_v1 else pad_batch([prompt])
    with pytest.raises(ValueError) as error:
        module.generate(*arguments, params, hparams["n_head"], n_new)
    for number in n_prompt, n_new, 64:
        assert str(number) in str(error.value)


@pytest.mark.parametrize("module", [gpt2_v1, *BATCHED])
@pytest.mark.parametrize("n_prompt, n_new", [(1, 1), (64, 1), (10, 55)])
def test_what_just_fits(module, n_prompt, n_new):
    hparams = make_hparams(n_ctx=64)
    params = random_params(hparams)
    prompt = [1] * n_prompt
    arguments = [prompt] if module is gpt2_v1 else pad_batch([prompt])
    new_ids = module.generate(*arguments, params, hparams["n_head"], n_new)
    assert np.shape(new_ids) == ((n_new,) if module is gpt2_v1 else (1, n_new))


@pytest.mark.parametrize("module", [gpt2_v1, *BATCHED])
def test_nothing_to_continue(module):
    """No token at all; and, in a batch, one row that is all padding."""
    params, n_head = random_params(make_hparams()), 4
    nothing = np.zeros((2, 0), dtype=np.int64)
    with pytest.raises(ValueError, match="T = 0"):
        module.generate(*([[]] if module is gpt2_v1 else [nothing, nothing]), params, n_head, 3)
    if module is not gpt2_v1:
        input_ids, attention_mask = pad_batch(PROMPTS)
        attention_mask[1] = 0
        with pytest.raises(ValueError, match="no real token"):
            module.generate(input_ids, attention_mask, params, n_head, 3)


@pytest.mark.parametrize("module", BATCHED)
def test_pad_batch(module):
    input_ids, attention_mask = module.pad_batch([[5, 6, 7], [8], [0, 9]])
    np.testing.assert_array_equal(input_ids, [[5, 6, 7], [0, 0, 8], [0, 0, 9]])
    np.testing.assert_array_equal(attention_mask, [[1, 1, 1], [0, 0, 1], [0, 1, 1]])
    assert input_ids.dtype == np.int64
    assert attention_mask.dtype == np.float32
    for nothing in [], [[]], [[1], []]:
        with pytest.raises(ValueError, match="at least one"):
            module.pad_batch(nothing)
