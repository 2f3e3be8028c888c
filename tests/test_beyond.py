"""The files of beyond/: each idea gives what it promises, and nothing else changes."""
import os
import subprocess
import sys

import numpy as np
import pytest

import gpt2_v4_prealloc as v4
from beyond import sampling, sliding_window, speculative
from conftest import ROOT
from gpt2_v4_prealloc import pad_batch
from helpers import make_hparams, random_params

HPARAMS = make_hparams(n_ctx=80)
N_HEAD = HPARAMS["n_head"]
PROMPTS = [[7, 3, 19, 1, 25, 8, 11, 4, 2, 15], [9, 2], [1, 6, 4, 22]]


@pytest.fixture(scope="module")
def params():
    return random_params(HPARAMS)


@pytest.fixture(scope="module")
def elsewhere():
    """What Transformers and PyTorch computed; tests/data/make_beyond.py says how."""
    return np.load(ROOT / "tests" / "data" / "beyond.npz")


def run(name, *arguments):
    """python -m beyond.NAME: its status, text on stdout and lines on stderr."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run([sys.executable, "-m", f"beyond.{name}", *arguments], cwd=ROOT,
                            capture_output=True, timeout=60, env=environment, encoding="utf-8")
    return result.returncode, result.stdout, result.stderr.splitlines()


def refused(name, *arguments):
    """The one line in which python -m beyond.NAME says what is wrong."""
    status, text, lines = run(name, *arguments)
    assert (status, text, len(lines)) == (2, "", 1), lines
    assert lines[0].startswith(f"python -m beyond.{name}: error: ")
    return lines[0]


# sampling.py

def test_probabilities_are_those_of_transformers(elsewhere):
    for n, (temperature, top_k, top_p) in enumerate(elsewhere["settings"]):
        for logits, expected in (("logits", "probabilities"), ("ties", "tied_probabilities")):
            actual = sampling.probabilities(elsewhere[logits], temperature, int(top_k), top_p)
            np.testing.assert_allclose(actual, elsewhere[expected][n], rtol=2e-5, atol=1e-7)
            np.testing.assert_allclose(actual.sum(axis=-1), 1, rtol=1e-12)


def test_probabilities_at_the_ends_of_the_ranges():
    logits = np.array([[[3, 1, 3, -np.inf]]], dtype=np.float32)  # any shape [..., V]
    both, first = [[[0.5, 0, 0.5, 0]]], [[[1, 0, 0, 0]]]
    np.testing.assert_array_equal(sampling.probabilities(logits, temperature=0), first)
    np.testing.assert_array_equal(sampling.probabilities(logits, temperature=0, top_k=9), first)
    for tiny in 1e-3, 1e-45, 1e-200:
        np.testing.assert_array_equal(sampling.probabilities(logits, temperature=tiny), both)
    np.testing.assert_array_equal(sampling.probabilities(logits, top_k=1), both)  # ties stay
    for top_p in 0, 1e-9:
        assert (sampling.probabilities(logits, top_p=top_p) > 0).sum() == 1
    off = sampling.probabilities(logits)
    assert (off > 0).sum() == 3
    np.testing.assert_array_equal(sampling.probabilities(logits, 1.0, 0, 1.0), off)
    np.testing.assert_array_equal(sampling.probabilities(logits, top_k=100), off)


def test_probabilities_leave_the_logits_alone():
    logits = np.random.RandomState(0).randn(2, 30).astype(np.float32)
    before = logits.copy()
    sampling.probabilities(logits, 0.5, 10, 0.8)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("setting", [(1, 0, 1), (0.7, 20, 0.9)])
def test_draws_fit_the_probabilities(setting):
    """Chi-square: 20,000 draws, all by one stream; the limit is that of 1 in 10,000."""
    logits = np.random.RandomState(3).randn(1, 1, 30).astype(np.float32)
    p, streams = sampling.probabilities(logits, *setting), [np.random.default_rng(5)]
    counts = np.bincount([sampling.draw(p, streams)[0, 0] for _ in range(20_000)], minlength=30)
    possible = p[0, 0] > 0
    assert counts[~possible].sum() == 0
    expected = 20_000 * p[0, 0, possible]
    assert expected.min() > 5
    chi_square = ((counts[possible] - expected)**2 / expected).sum()
    degrees = possible.sum() - 1
    # Wilson and Hilferty's approximation; 3.72 is the normal distribution's quantile of 0.9999
    assert chi_square < degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees))**0.5)**3


def test_generate_draws_from_the_model(params):
    """First and second tokens of 2,000 equal rows fit the probabilities that the model gives."""
    prompt, setting = [9, 2], (1.5, 6, 1.0)
    batch = pad_batch([prompt] * 2000)
    new_ids = sampling.generate(*batch, params, N_HEAD, 2, *setting, seed=0)

    def next_probabilities(ids):
        T = len(ids)
        mask = (1 - np.tri(T, dtype=np.float32)) * -1e10
        logits = v4.gpt2(np.array([ids]), np.arange(T)[None], mask, None, **params, n_head=N_HEAD)
        return sampling.probabilities(logits[0, -1], *setting)

    first = next_probabilities(prompt)
    np.testing.assert_allclose(np.bincount(new_ids[:, 0], minlength=97) / 2000, first, atol=0.04)
    likely = np.argmax(first)
    after = new_ids[new_ids[:, 0] == likely, 1]
    np.testing.assert_allclose(np.bincount(after, minlength=97) / len(after),
                               next_probabilities([*prompt, int(likely)]), atol=0.08)


def test_temperature_0_gives_the_tokens_of_version_4(params):
    batch = pad_batch(PROMPTS)
    expected = v4.generate(*batch, params, N_HEAD, 71)
    for seed in None, 3:
        actual = sampling.generate(*batch, params, N_HEAD, 71, temperature=0, seed=seed)
        np.testing.assert_array_equal(actual, expected)


def test_a_seed_repeats_its_text_and_no_other_does(params):
    batch = pad_batch(PROMPTS)

    def sample(seed):
        return sampling.generate(*batch, params, N_HEAD, 20, temperature=2.0, seed=seed)

    np.testing.assert_array_equal(sample(7), sample(7))
    assert (sample(7) != sample(8)).any()
    assert (sample(None) != sample(None)).any()


def test_a_rows_text_does_not_depend_on_the_other_rows(params):
    """Whatever they are, and however many come after; equal rows get texts of their own."""
    def sample(prompts):
        return sampling.generate(*pad_batch(prompts), params, N_HEAD, 20, temperature=2.0, seed=7)

    together = sample(PROMPTS)
    np.testing.assert_array_equal(sample(PROMPTS[:1])[0], together[0])
    np.testing.assert_array_equal(sample(PROMPTS[:2])[1], together[1])
    np.testing.assert_array_equal(sample([[5], [6, 6, 6], PROMPTS[2], [1]])[2], together[2])
    equal = sample([[5], [5], [5]])
    assert (equal[0] != equal[1]).any() and (equal[1] != equal[2]).any()


@pytest.mark.parametrize("wrong", [
    {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
    {"top_k": -1}, {"top_p": -0.1}, {"top_p": 1.1}, {"top_p": float("nan")}, {"seed": -1}], ids=str)
def test_sampling_refuses_what_is_out_of_range(wrong, params):
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        sampling.generate(*pad_batch(PROMPTS), params, N_HEAD, 5, **wrong)
    if name != "seed":
        with pytest.raises(ValueError, match=f"{name} = {value}"):
            sampling.probabilities(np.zeros(5, dtype=np.float32), **wrong)
        assert f"{name} = {value}" in refused("sampling", "Once", f"--{name}", str(value))


@pytest.mark.parametrize("T, n", [(10, 72), (3, 0)])
def test_sampling_refuses_what_does_not_fit(T, n, params):
    with pytest.raises(ValueError, match=f"n = {n} tokens after T = {T}.* n_ctx = 80"):
        sampling.generate(*pad_batch([[1] * T]), params, N_HEAD, n)


def test_sampling_from_the_command_line():
    command = "sampling", "Once upon a time", "The king", "-n", "8", "--top_k", "50"
    status, text, lines = run(*command)
    assert status == 0
    assert text.startswith("Once upon a time") and "\n\nThe king" in text
    seed = lines[-1].partition("--seed ")[2].split()[0]
    assert lines[-1] == (f"drawn at temperature 1.0, top_k 50, top_p 1.0; --seed {seed} draws the "
                         f"same again")
    assert run(*command, "--seed", seed)[1] == text


# speculative.py

def counting(module, monkeypatch):
    """A list that gets the number of positions of each pass from now on."""
    sizes, gpt2 = [], module.gpt2

    def noting(input_ids, *args, **kwargs):
        sizes.append(input_ids.shape[1])
        return gpt2(input_ids, *args, **kwargs)

    monkeypatch.setattr(module, "gpt2", noting)
    return sizes


SNIP = "Snip, snap, snout. " * 8
REPETITIVE = [[5], [3] * 20, [1, 2, 3] * 6, [8, 4, 8, 4, 9, 8, 4], list(range(40)) + [4, 5]]


@pytest.mark.parametrize("n_draft, ngram", [(1, 1), (8, 2), (8, 5), (100, 1)])
def test_speculative_tokens_are_those_of_version_4(n_draft, ngram, params):
    """To the last position of the context, on texts that repeat themselves and on others."""
    for prompt in PROMPTS + REPETITIVE:
        batch = pad_batch([prompt])
        n = 81 - len(prompt)                      # T + n - 1 = 80
        expected = v4.generate(*batch, params, N_HEAD, n)
        actual = speculative.generate(*batch, params, N_HEAD, n, n_draft, ngram)
        np.testing.assert_array_equal(actual, expected)
        for few in 1, 2, 3:
            actual = speculative.generate(*batch, params, N_HEAD, few, n_draft, ngram)
            np.testing.assert_array_equal(actual, expected[:, :few])


def test_speculative_on_the_bundled_model(tiny):
    encoder, hparams, params = tiny
    for text, n_passes in (("Once upon a time", 60), (SNIP, 48)):  # no repetition yet; at once
        batch = pad_batch([encoder.encode(text)])
        expected = v4.generate(*batch, params, hparams["n_head"], 60)
        passes = list(speculative.speculate(*batch, params, hparams["n_head"], 60))
        assert sum(passes, []) == expected[0].tolist()
        assert len(passes) <= n_passes


@pytest.mark.parametrize("n_draft", [1, 4, 50])
@pytest.mark.parametrize("n_right", [0, 1, 3, 50])
def test_whatever_is_guessed(n_draft, n_right, params, monkeypatch):
    """Guesses whose first n_right tokens are right: as many are kept, and one token more."""
    prompt, n = PROMPTS[0], 71
    expected = v4.generate(*pad_batch([prompt]), params, N_HEAD, n)[0].tolist()
    text = prompt + expected

    def guess(ids, n_draft, ngram):
        right = text[len(ids):len(ids) + n_draft]
        return right[:n_right] + [(token + 1) % 97 for token in right[n_right:]]

    monkeypatch.setattr(speculative, "look_up", guess)
    sizes = counting(speculative, monkeypatch)
    actual = speculative.generate(*pad_batch([prompt]), params, N_HEAD, n, n_draft)
    assert actual.tolist() == [expected]
    assert len(sizes) == -(-n // (min(n_draft, n_right) + 1))
    assert sizes[0] == len(prompt) + min(n_draft, n - 1)
    assert max(sizes[1:], default=0) <= n_draft + 1


def test_look_up():
    look_up = speculative.look_up
    assert look_up([1, 2, 3, 4, 5, 1, 2], 3, 2) == [3, 4, 5]
    assert look_up([1, 2, 3, 1, 2, 4, 1, 2], 2, 2) == [4, 1]  # the latest place
    assert look_up([1, 2, 3, 1, 9, 2], 2, 2) == []
    assert look_up([7, 7, 7], 4, 2) == [7, 7, 7, 7]           # on into the guess itself
    assert look_up([1, 2, 1, 2], 5, 2) == [1, 2, 1, 2, 1]
    assert look_up([5, 1], 3, 2) == look_up([5], 3, 1) == look_up([5], 3, 4) == []


def test_speculative_counts_its_passes(params, monkeypatch):
    """What speculate yields is what gpt2 was called for, and prefill is the first of it."""
    sizes = counting(speculative, monkeypatch)
    passes = list(speculative.speculate(*pad_batch([PROMPTS[0]]), params, N_HEAD, 71))
    assert len(passes) == len(sizes)
    assert sum(map(len, passes)) == 71


def test_speculative_leaves_padding_out(params):
    batch = pad_batch([[1] * 8, [9, 2]])
    actual = speculative.generate(*(array[1:] for array in batch), params, N_HEAD, 30)
    expected = v4.generate(*pad_batch([[9, 2]]), params, N_HEAD, 30)
    np.testing.assert_array_equal(actual, expected)


def test_speculative_refuses(params):
    with pytest.raises(ValueError, match="3 rows"):
        speculative.generate(*pad_batch(PROMPTS), params, N_HEAD, 5)
    for n_draft, ngram in (0, 2), (8, 0), (-1, 2):
        with pytest.raises(ValueError, match=f"n_draft = {n_draft} and ngram = {ngram}"):
            speculative.generate(*pad_batch(PROMPTS[:1]), params, N_HEAD, 5, n_draft, ngram)
    for T, n in (10, 72), (3, 0):
        with pytest.raises(ValueError, match=f"n = {n} tokens after T = {T}.* n_ctx = 80"):
            speculative.generate(*pad_batch([[1] * T]), params, N_HEAD, n)
    assert "2 prompts" in refused("speculative", "Once", "upon")
    assert "--n_draft" in refused("speculative", "Once", "--n_draft", "0")


def test_speculative_from_the_command_line(tiny):
    encoder, hparams, params = tiny
    expected = v4.generate(*pad_batch([encoder.encode(SNIP)]), params, hparams["n_head"], 30)
    status, text, lines = run("speculative", SNIP, "-n", "30", "--n_draft", "5")
    assert (status, text) == (0, SNIP + encoder.decode(expected[0]) + "\n")
    n_passes = int(lines[-1].split()[3])
    assert lines[-1] == f"30 tokens in {n_passes} passes: {30 - n_passes} were guessed right"
    assert n_passes < 30


# sliding_window.py

def logits_of_passes(module, monkeypatch):
    """A list that gets, from each pass from now on, the logits [B, V] of the last position."""
    logits, gpt2 = [], module.gpt2

    def noting(*args, **kwargs):
        result = gpt2(*args, **kwargs)
        logits.append(result[:, -1])
        return result

    monkeypatch.setattr(module, "gpt2", noting)
    return logits


def banded_logits(ids, params, window, n_sinks):
    """Logits [B, T, V] of version 4 without a cache, each query seeing its window and the sinks."""
    query, key = np.arange(ids.shape[1])[:, None], np.arange(ids.shape[1])
    seen = (key <= query) & ((key > query - window) | (key < n_sinks))
    mask = np.where(seen, 0, -1e10).astype(np.float32)
    return v4.gpt2(ids, np.arange(ids.shape[1])[None], mask, None, **params, n_head=N_HEAD)


@pytest.mark.parametrize("window, n_sinks", [
    (1, 0), (1, 1), (2, 3), (7, 0), (7, 2), (16, 4), (5, 30), (5, 79), (39, 0), (78, 1), (79, 0)])
@pytest.mark.parametrize("T", [1, 40])
def test_window_logits_are_those_of_a_banded_mask(window, n_sinks, T, params, monkeypatch):
    """At every step, for prompts shorter and longer than the window, and two rows."""
    prompts = np.random.RandomState(1).randint(0, 97, (2, T))
    logits = logits_of_passes(sliding_window, monkeypatch)
    new_ids = sliding_window.generate(prompts, np.ones((2, T)), params, N_HEAD, 80 - T, window,
                                      n_sinks)
    expected = banded_logits(np.concatenate([prompts, new_ids], axis=-1), params, window, n_sinks)
    expected = expected[:, T - 1:-1]              # after the prompt, and each new token but the last
    actual = np.stack(logits[-(80 - T):], axis=1)
    assert abs(actual - expected).max() < 1e-5 * abs(expected).max()
    np.testing.assert_array_equal(new_ids, np.argmax(expected, axis=-1))
    assert len(logits) == -(-T // window) + 79 - T


def test_a_window_as_long_as_the_text_gives_the_tokens_of_version_4(params):
    batch = pad_batch([PROMPTS[0], PROMPTS[0][::-1]])
    expected = v4.generate(*batch, params, N_HEAD, 71)
    for window, n_sinks in (80, 0), (80, 5), (10**15, 10**15), (30, 50), (1, 79):
        actual = sliding_window.generate(*batch, params, N_HEAD, 71, window, n_sinks)
        np.testing.assert_array_equal(actual, expected)
    assert (sliding_window.generate(*batch, params, N_HEAD, 71, 20) != expected).any()


@pytest.mark.parametrize("window", [100, 256, 300])
def test_long_prompts_go_through_in_pieces(window, monkeypatch):
    """Of at most 256 positions, and no longer than the window; the tokens are the same."""
    hparams = make_hparams(n_ctx=700)
    params = random_params(hparams)
    prompts = np.random.RandomState(2).randint(0, 97, (1, 650))
    logits = logits_of_passes(sliding_window, monkeypatch)
    sizes = counting(sliding_window, monkeypatch)
    new_ids = sliding_window.generate(prompts, np.ones((1, 650)), params, N_HEAD, 3, window, 4)
    size = min(window, 256)
    assert sizes == [size] * (650 // size) + [650 % size] + [1, 1]
    expected = banded_logits(np.concatenate([prompts, new_ids], axis=-1), params, window, 4)
    for n in range(3):
        assert abs(logits[n - 3] - expected[:, 649 + n]).max() < 1e-5 * abs(expected).max()


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
def test_window_cache_returns_the_positions_that_it_says(garbage):
    """Chunks of any size, longer than the window too; each key has its position as its value."""
    cache = sliding_window.SlidingWindowCache(2, 3, 2, window=5, head_dim=4, n_sinks=2)
    assert cache.nbytes == 2 * 2 * 3 * 2 * (5 + 2) * 4 * 4
    cache.keys[:] = cache.values[:] = garbage
    start = 0
    for T in 1, 1, 3, 1, 1, 1, 1, 9, 1, 2, 1, 1, 5, 6, 1, 7, 1:
        new = np.arange(start, start + T, dtype=np.float32)[:, None]
        k = np.broadcast_to(new, (3, 2, T, 4))
        positions = cache.key_positions(start, T)
        for layer in range(2):
            keys, values = cache.update(layer, k, -k)
            assert keys.shape == values.shape == (3, 2, len(positions), 4)
            assert (keys == positions[:, None]).all() and (values == -positions[:, None]).all()
        needed = {p for p in range(start + T) if p > start - 5 or p < 2}
        assert needed <= set(positions.tolist())
        assert len(set(positions.tolist())) == len(positions) <= 7 + (T if T > 1 else 0)
        if T == 1:
            assert np.shares_memory(keys, cache.keys) and np.shares_memory(values, cache.values)
        start += T


def test_window_cache_refuses_what_does_not_fit():
    cache = sliding_window.SlidingWindowCache(1, 2, 2, window=5, head_dim=4)
    for shape in (1, 2, 1, 4), (2, 1, 1, 4), (2, 2, 1, 1):
        with pytest.raises(ValueError, match="don't fit"):
            cache.update(0, np.zeros(shape), np.zeros(shape))
    with pytest.raises(ValueError, match="don't fit"):
        cache.update(0, np.zeros((2, 2, 1, 4)), np.zeros((2, 2, 2, 4)))
    assert cache.lengths == [0]


def test_window_refuses(params):
    batch = pad_batch([PROMPTS[0]])
    for window, n_sinks in (0, 0), (-1, 0), (5, -1):
        with pytest.raises(ValueError, match=f"window = {window} .*n_sinks = {n_sinks} "):
            sliding_window.generate(*batch, params, N_HEAD, 5, window, n_sinks)
    with pytest.raises(ValueError, match="10  2  4. tokens.*equal length"):
        sliding_window.generate(*pad_batch(PROMPTS), params, N_HEAD, 5, 8)
    for T, n in (10, 72), (3, 0):
        with pytest.raises(ValueError, match=f"n = {n} tokens after T = {T}.* n_ctx = 80"):
            sliding_window.generate(*pad_batch([[1] * T]), params, N_HEAD, n, 8)
    assert "equal length" in refused("sliding_window", "Once upon a time", "The")
    assert "n_sinks = -1" in refused("sliding_window", "Once", "--n_sinks", "-1")


def test_window_from_the_command_line(tiny):
    encoder, hparams, params = tiny
    texts = "Once upon a time", "Twice upon a day"
    prompts = [encoder.encode(text)[-4:] for text in texts]
    texts = [encoder.decode(prompt) for prompt in prompts]
    expected = sliding_window.generate(*pad_batch(prompts), params, hparams["n_head"], 20, 8, 2)
    status, text, lines = run("sliding_window", *texts, "-n", "20", "--window", "8",
                              "--n_sinks", "2")
    assert status == 0
    assert text == "\n\n".join(text + encoder.decode(ids)
                               for text, ids in zip(texts, expected)) + "\n"
    assert lines[-1] == f"the cache kept 10 of {len(prompts[0]) + 19} positions"
