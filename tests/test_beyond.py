"""The files of beyond/: each idea gives what it promises, and nothing else changes."""
import subprocess
import sys

import numpy as np
import pytest

import gpt2_v4_prealloc as v4
from beyond import paged, quantized, sampling, sliding_window, speculative
from conftest import ROOT
from gpt2_v4_prealloc import pad_batch
from helpers import make_hparams, random_params, run_here

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
    """A file of beyond/: its exit status, text on stdout and lines on stderr, without bars."""
    status, stdout, stderr = run_here(f"beyond/{name}.py", *arguments)
    bars = "generating", "reading the weights"
    lines = [line for line in stderr.splitlines() if line and not line.startswith(bars)]
    return status, stdout, lines


@pytest.mark.parametrize("name", ["paged"])
def test_as_a_module(name):
    """As the README says, from the root of the repository."""
    result = subprocess.run([sys.executable, "-m", f"beyond.{name}", "Once", "-n", "2"], cwd=ROOT,
                            capture_output=True, timeout=60)
    assert result.returncode == 0 and result.stdout.startswith(b"Once")


def printed(texts, new_ids, encoder):
    """What a program prints: each text with its continuation."""
    return "\n\n".join(text + encoder.decode(ids) for text, ids in zip(texts, new_ids)) + "\n"


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
    """Chi-square: 10,000 draws, all by one stream; the limit is that of 1 in 10,000."""
    logits = np.random.RandomState(3).randn(1, 1, 30).astype(np.float32)
    p, streams = sampling.probabilities(logits, *setting), [np.random.default_rng(5)]
    counts = np.bincount([sampling.draw(p, streams)[0, 0] for _ in range(10_000)], minlength=30)
    possible = p[0, 0] > 0
    assert counts[~possible].sum() == 0
    expected = 10_000 * p[0, 0, possible]
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
    with pytest.raises(ValueError, match=f"{name} is {value}, but must be"):
        sampling.generate(*pad_batch(PROMPTS), params, N_HEAD, 5, **wrong)
    if name != "seed":
        with pytest.raises(ValueError, match=f"{name} is {value}, but must be"):
            sampling.probabilities(np.zeros(5, dtype=np.float32), **wrong)


def test_sampling_options_out_of_range():
    line = refused("sampling", "Once", "--temperature", "-0.1")
    assert "temperature is -0.1, but must be 0 or more" in line
    assert "seed is -1" in refused("sampling", "Once", "--seed", "-1")


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


@pytest.mark.parametrize("n_draft, ngram", [(1, 1), (8, 2), (100, 1)])
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
    assert "2 prompts" in refused("speculative", "Once", "upon", "--n_draft", "1")


def test_speculative_from_the_command_line(tiny):
    encoder, hparams, params = tiny
    expected = v4.generate(*pad_batch([encoder.encode(SNIP)]), params, hparams["n_head"], 30)
    status, text, lines = run("speculative", SNIP, "-n", "30", "--n_draft", "5")
    assert (status, text) == (0, printed([SNIP], expected, encoder))
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
    expected = expected[:, T - 1:-1]              # from the prompt's end on; not the last token's
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


def test_window_from_the_command_line(tiny):
    encoder, hparams, params = tiny
    texts = "Once upon a time", "Twice upon a day"
    prompts = [encoder.encode(text)[-4:] for text in texts]
    texts = [encoder.decode(prompt) for prompt in prompts]
    expected = sliding_window.generate(*pad_batch(prompts), params, hparams["n_head"], 20, 8, 2)
    status, text, lines = run("sliding_window", *texts, "-n", "20", "--window", "8",
                              "--n_sinks", "2")
    assert (status, text) == (0, printed(texts, expected, encoder))
    assert lines[-1] == f"the cache kept 10 of {len(prompts[0]) + 19} positions"


# quantized.py

FORMATS = [(dtype, scales) for dtype in ("fp8", "int8") for scales in ("position", "head")]
NUMBERS = {"fp8": quantized.E4M3[np.isfinite(quantized.E4M3)], "int8": np.arange(-127, 128)}


def test_e4m3_is_that_of_pytorch(elsewhere):
    """All 256 codes, NaN and -0 too; rounding of these, of midpoints, and of their sides."""
    assert quantized.E4M3.dtype == np.float32
    np.testing.assert_array_equal(quantized.E4M3, elsewhere["e4m3"])
    np.testing.assert_array_equal(np.signbit(quantized.E4M3), np.arange(256) >= 128)
    rounded = quantized.E4M3[quantized.encode(elsewhere["values"], "fp8")]
    np.testing.assert_array_equal(rounded, elsewhere["rounded"])
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(elsewhere["rounded"]))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_what_is_too_large_saturates(dtype):
    largest = quantized.LARGEST[dtype]
    x = np.array([largest, 1.2 * largest, 1e30, np.inf], dtype=np.float32)
    one = np.ones(4, dtype=np.float32)
    decoded = quantized.decode(quantized.encode(np.concatenate([x, -x]), dtype), 1, dtype)
    np.testing.assert_array_equal(decoded, np.concatenate([largest * one, -largest * one]))


def test_int8_rounds_to_the_nearest_and_ties_to_even():
    x = np.array([-126.6, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.4, 126.5], dtype=np.float32)
    codes = quantized.encode(x, "int8")
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(codes, [-127, -2, -2, 0, 0, 2, 2, 3, 126])


@pytest.mark.parametrize("dtype, scales", FORMATS)
def test_quantized_cache_returns_the_nearest_numbers(dtype, scales):
    """Of each position, or of the first write: its largest value exactly, the others rounded."""
    random = np.random.RandomState(0)
    k, v = (random.randn(2, 3, 5, 4) * 10.0**random.randint(-3, 3, (2, 3, 5, 1)) for _ in range(2))
    k, v = k.astype(np.float32), v.astype(np.float32)
    cache = quantized.QuantizedKVCache(2, 2, 3, 8, 4, dtype, scales)
    for layer in 0, 1:
        results = cache.update(layer, k, v)
    for x, actual in zip((k, v), results):
        assert actual.dtype == np.float32
        scale = abs(x).max(axis=-1 if scales == "position" else (-2, -1), keepdims=True)
        scale = scale / quantized.LARGEST[dtype]
        distance = abs(x[..., None] / scale[..., None] - NUMBERS[dtype])
        nearest = NUMBERS[dtype][np.argmin(distance, axis=-1)]
        np.testing.assert_allclose(actual, nearest * scale, rtol=1e-6)
    assert cache.length == 5


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_scales_of_a_head_come_from_the_first_write(dtype):
    """Later values saturate; after reset there is another first write."""
    cache = quantized.QuantizedKVCache(1, 1, 2, 8, 1, dtype, "head")
    first = np.array([[[[1.0], [-4.0]], [[0.5], [0.25]]]], dtype=np.float32)  # [1, 2, 2, 1]
    later = np.array([[[[100.0]], [[-3.0]]]], dtype=np.float32)
    cache.update(0, first, 2 * first)
    keys, values = cache.update(0, later, later)
    np.testing.assert_allclose(keys[0, :, 2, 0], [4, -0.5], rtol=1e-6)
    np.testing.assert_allclose(values[0, :, 2, 0], [8, -1], rtol=1e-6)
    np.testing.assert_allclose(keys[0, :, 0, 0], [1, 0.5], rtol=0.07)
    cache.reset()
    keys, _ = cache.update(0, later, later)
    np.testing.assert_allclose(keys, later, rtol=1e-6)


@pytest.mark.parametrize("dtype, scales", FORMATS)
def test_a_head_of_all_zeros(dtype, scales):
    cache = quantized.QuantizedKVCache(1, 1, 2, 8, 4, dtype, scales)
    zeros, tiny = np.zeros((1, 2, 3, 4), dtype=np.float32), np.full((1, 2, 1, 4), np.float32(1e-45))
    with np.errstate(all="raise", under="ignore"):
        for x in zeros, tiny, np.ones_like(tiny):
            keys, values = cache.update(0, x, x)
    assert (keys[:, :, :3] == 0).all() and (values[:, :, :4] == 0).all()
    np.testing.assert_array_equal(keys[:, :, 4], 1)


@pytest.mark.parametrize("dtype, scales", FORMATS)
def test_quantized_bytes(dtype, scales):
    """A quarter of float32's, and the scales."""
    cache = quantized.QuantizedKVCache(3, 2, 4, 50, 64, dtype, scales)
    n_scales = 2 * 3 * 2 * 4 * (50 if scales == "position" else 1)
    assert cache.nbytes == v4.kv_cache_bytes(3, 2, 50, 4, 64) // 4 + 4 * n_scales


@pytest.mark.parametrize("dtype, scales", FORMATS)
def test_quantized_cache_refuses_what_does_not_fit(dtype, scales):
    cache = quantized.QuantizedKVCache(1, 2, 3, 4, 5, dtype, scales)
    k = np.random.RandomState(0).randn(2, 3, 3, 5).astype(np.float32)
    before = cache.update(0, k, k)
    right = np.ones((2, 3, 1, 5))
    for wrong in map(np.ones, [(1, 3, 1, 5), (2, 1, 1, 5), (2, 3, 1, 4), (2, 3, 2, 5)]):
        for pair in (wrong, right), (right, wrong):
            with pytest.raises(ValueError, match="fit|capacity"):
                cache.update(0, *pair)
    with pytest.raises(ValueError, match="5 positions exceed the cache's capacity of 4"):
        cache.update(0, np.ones((2, 3, 2, 5)), np.ones((2, 3, 2, 5)))
    assert cache.length == 3
    after = cache.update(0, k[:, :, :1], k[:, :, :1])
    np.testing.assert_array_equal(after[0][:, :, :3], before[0])
    np.testing.assert_array_equal(after[1][:, :, :3], before[1])
    for wrong in {"dtype": "fp16"}, {"scales": "layer"}:
        with pytest.raises(ValueError, match=str(*wrong.values())):
            quantized.QuantizedKVCache(1, 2, 3, 4, 5, **wrong)


@pytest.fixture(scope="module")
def float32_run(tiny):
    """Ids [1, 120] of a greedy text of the bundled model, and version 4's logits [119, V]."""
    encoder, hparams, params = tiny
    input_ids, attention_mask = pad_batch([encoder.encode("Once upon a time there was a king")])
    new_ids = v4.generate(input_ids, attention_mask, params, hparams["n_head"],
                          120 - input_ids.shape[1])
    ids = np.concatenate([input_ids, new_ids], axis=-1)
    return ids, logits_with(v4.KVCache(4, 1, 4, 119, 64), ids, params)


def in_other_units(params):
    """The same model, with keys and values of very different size in its four heads.

    Queries and the output projection make up for it, and powers of 2 are exact: equal logits.
    """
    units = (2.0**np.array([0, -6, -12, -18], dtype=np.float32))[:, None]  # [H, 1]
    factors = np.stack([1 / units, units, units])                # [3, H, 1], for q, k and v
    blocks = []
    for block in params["blocks"]:
        c_attn, c_proj = block["attn"]["c_attn"], block["attn"]["c_proj"]
        attn = {"c_attn": {name: (array.reshape(-1, 3, 4, 64) * factors).reshape(array.shape)
                           for name, array in c_attn.items()},
                "c_proj": c_proj | {"w": c_proj["w"] / np.repeat(units, 64, axis=0)}}
        blocks.append(block | {"attn": attn})
    return params | {"blocks": blocks}


def logits_with(cache, ids, params):
    """Logits [T - 1, V] of the bundled model: 8 positions in one pass, then one a pass."""
    logits = []
    for start, stop in [(0, 8), *((n, n + 1) for n in range(8, ids.shape[1] - 1))]:
        pos_ids = np.arange(start, stop)
        mask = np.where(np.arange(stop) <= pos_ids[:, None], 0, -1e10).astype(np.float32)
        logits.append(v4.gpt2(ids[:, start:stop], pos_ids[None], mask, cache, **params, n_head=4))
    return np.concatenate(logits, axis=1)[0]


@pytest.mark.parametrize("dtype, scales, bound", [
    ("fp8", "position", 0.016), ("int8", "position", 0.004), ("fp8", "head", 0.05),
    ("int8", "head", 0.05)])
def test_logit_error(dtype, scales, bound, float32_run, tiny):
    """Root mean square over the logits' spread: a wrong scale breaks it, or one for all heads."""
    ids, expected = float32_run
    cache = quantized.QuantizedKVCache(4, 1, 4, 119, 64, dtype, scales)
    error = logits_with(cache, ids, in_other_units(tiny[2])) - expected
    assert 0 < np.sqrt((error**2).mean()) / expected.std() < bound


@pytest.mark.parametrize("dtype, scales", FORMATS)
def test_quantized_generate(dtype, scales, params):
    """Version 4's with this cache; the first token of a prompt hardly depends on it."""
    batch = pad_batch(PROMPTS)
    cache = quantized.QuantizedKVCache(2, 3, 4, 80, 8, dtype, scales)
    expected = v4.generate(*batch, params, N_HEAD, 71, cache)
    actual = quantized.generate(*batch, params, N_HEAD, 71, dtype, scales)
    np.testing.assert_array_equal(actual, expected)


def test_quantized_generate_refuses(params):
    for T, n in (10, 72), (3, 0), (3, -9), (3, 10**15):
        with pytest.raises(ValueError, match=f"n = {n} tokens after T = {T}.* n_ctx = 80"):
            quantized.generate(*pad_batch([[1] * T]), params, N_HEAD, n)
    with pytest.raises(ValueError, match="fp16"):
        quantized.generate(*pad_batch(PROMPTS), params, N_HEAD, 5, "fp16")
    assert "--dtype" in refused("quantized", "Once", "--dtype", "fp16")


def test_quantized_from_the_command_line(tiny):
    encoder, hparams, params = tiny
    texts = ["Once upon a time", "The king"]
    batch = pad_batch([encoder.encode(text) for text in texts])
    new_ids = quantized.generate(*batch, params, hparams["n_head"], 10, "int8", "head")
    command = "quantized", *texts, "-n", "10", "--dtype", "int8", "--scales", "head"
    status, text, lines = run(*command)
    assert (status, text) == (0, printed(texts, new_ids, encoder))
    values = v4.kv_cache_bytes(4, 2, batch[0].shape[1] + 9, 4, 64)
    assert lines[-1] == (f"the cache took {values // 4 + 4 * 2 * 4 * 2 * 4:,} bytes; in float32 it "
                         f"takes {values:,}")


# paged.py

REQUESTS = [(PROMPTS[0], 30), (PROMPTS[1], 70), (PROMPTS[2], 1), ([5] * 33, 20), ([8, 4] * 8, 12),
            (list(range(32)), 17), ([9, 2, 9], 5), ([1], 48)]


@pytest.fixture(scope="module")
def alone(params):
    """What version 4 gives for each of REQUESTS alone."""
    return [v4.generate(*pad_batch([prompt]), params, N_HEAD, n)[0] for prompt, n in REQUESTS]


def assert_served(params, alone, order=range(8), **options):
    """Each request gets version 4's tokens. Returns (batch size, pages in use, positions), by pass.

    No page is lost: at the end of each pass the tables and the list of free pages account for all.
    """
    passes = []

    def watch(running, cache):
        users = [page for request in running for page in request.pages]
        assert sorted({*users, *cache.free}) == list(range(cache.n_pages))
        assert len(set(users)) + len(cache.free) == cache.n_pages
        assert all(cache.n_users[page] == users.count(page) for page in range(cache.n_pages))
        passes.append((len(running), len(set(users)), sum(r.n_cached for r in running)))
        caches.append(cache)

    caches = []
    actual = paged.generate([REQUESTS[n][0] for n in order], params, N_HEAD,
                            [REQUESTS[n][1] for n in order], after_pass=watch, **options)
    for ids, n in zip(actual, order):
        np.testing.assert_array_equal(ids, alone[n])
    assert len(caches[0].free) == caches[0].n_pages and not caches[0].page_of
    return passes


@pytest.mark.parametrize("order", [
    range(8), [3, 1, 4, 7, 5, 2, 6, 0], [1, 1, 3, 3, 3, 5, 5]], ids=str)
def test_paged_tokens_are_those_of_version_4(order, params, alone):
    """In any order of arrival, and for pools of all sizes that take each request alone."""
    for options in {}, {"n_pages": 5}, {"n_pages": 7, "max_batch": 3}, {"max_batch": 1}, \
            {"n_pages": 71, "page_size": 1}, {"n_pages": 1, "page_size": 80}, \
            {"n_pages": 11, "page_size": 7}:
        assert_served(params, alone, order, **options)


def test_paged_on_the_bundled_model(tiny):
    encoder, hparams, params = tiny
    prompts = [encoder.encode(text) for text in ("Once upon a time", "The king", "In the forest")]
    expected = v4.generate(*pad_batch(prompts), params, hparams["n_head"], 40)
    actual = paged.generate(prompts, params, hparams["n_head"], 40, n_pages=5)
    np.testing.assert_array_equal(actual, expected)


def test_nothing_is_reserved(params, alone):
    """After each pass, the running requests have no page more than their positions need."""
    for running, pages, positions in assert_served(params, alone):
        assert positions <= 16 * pages < positions + 16 * running


def test_batches_are_continuous(params, alone):
    """One prefill each, then all decode together; a place is taken as soon as it is free."""
    n_new = [n for _, n in REQUESTS]
    passes = assert_served(params, alone)
    assert len(passes) == 8 + max(n_new) - 1      # its first token is one of the 8 prefills'
    passes = assert_served(params, alone, max_batch=3)
    assert max(running for running, _, _ in passes) == 3
    assert len(passes) < 8 + max(n_new) + 48
    assert len(assert_served(params, alone, range(4), max_batch=1)) == sum(n_new[:4])


def test_preemption(params, alone, monkeypatch):
    """The one that came last goes, and is prefilled again with what it has said."""
    sizes = counting(paged, monkeypatch)
    in_batch = []
    prompts = [REQUESTS[1][0], REQUESTS[7][0]]    # 71 and 48 positions, 5 and 3 pages
    actual = paged.generate(prompts, params, N_HEAD, [70, 48], n_pages=6,
                            after_pass=lambda running, cache: in_batch.append(len(running)))
    np.testing.assert_array_equal(actual[0], alone[1])
    np.testing.assert_array_equal(actual[1], alone[7])
    # two prefills; 46 passes of both, till the first has 48 positions and needs a fourth page; 23
    # of the first alone, to its end; the second again, with 48 ids, which gives the last of its own
    assert sizes == [2, 1] + [1] * 46 + [1] * 23 + [48]
    assert in_batch == [1, 2] + [2] * 46 + [1] * 23 + [1]


def test_requests_share_the_full_pages_of_their_beginning(params, monkeypatch):
    """Computed once, held once, and kept as long as one of them runs."""
    beginning = np.random.RandomState(4).randint(0, 97, 35).tolist()  # 2 full pages
    prompts = [beginning + [1, 2], beginning + [3], beginning[:32], beginning[:20], [7] + beginning,
               beginning[:32] + [5] * 16]
    ns = [3, 20, 20, 2, 2, 20]
    expected = [v4.generate(*pad_batch([prompt]), params, N_HEAD, n)[0]
                for prompt, n in zip(prompts, ns)]
    for order in range(6), range(5, -1, -1), [2, 0, 1, 3, 4, 5]:
        sizes, pages = counting(paged, monkeypatch), []
        actual = paged.generate(
            [prompts[n] for n in order], params, N_HEAD, [ns[n] for n in order],
            after_pass=lambda running, cache: pages.append(cache.n_pages - len(cache.free)))
        for ids, n in zip(actual, order):
            np.testing.assert_array_equal(ids, expected[n])
        if order == range(6):
            # 32 shared; of a text of 32, 16, so that a token is left; of one of 20, 16; none
            assert sizes[:6] == [37, 4, 16, 4, 36, 16]
            assert pages[:6] == [3, 4, 5, 6, 9, 10]
        monkeypatch.undo()


def test_a_second_copy_of_a_page_is_not_shared(params, monkeypatch):
    """A text of one full page computes it itself; when it ends, the first copy is still shared."""
    beginning = np.random.RandomState(4).randint(0, 97, 35).tolist()
    prompts, ns = [beginning, beginning[:16], [1], beginning + [4]], [30, 2, 4, 5]
    sizes = counting(paged, monkeypatch)
    actual = paged.generate(prompts, params, N_HEAD, ns, max_batch=3)
    assert [size for size in sizes if size > 1] == [35, 16, 4]
    for ids, prompt, n in zip(actual, prompts, ns):
        np.testing.assert_array_equal(ids, v4.generate(*pad_batch([prompt]), params, N_HEAD, n)[0])


def test_a_shared_page_outlives_the_one_who_filled_it(params):
    """And is given to nobody else until its last user is gone."""
    beginning = [3] * 16
    prompts = [beginning + [1], beginning + [2], [4] * 17, [6] * 17]
    expected = [v4.generate(*pad_batch([prompt]), params, N_HEAD, n)[0]
                for prompt, n in zip(prompts, [2, 15, 15, 15])]
    actual = paged.generate(prompts, params, N_HEAD, [2, 15, 15, 15], n_pages=5, max_batch=3)
    for ids, tokens in zip(actual, expected):
        np.testing.assert_array_equal(ids, tokens)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("n_passes", [0, 1, 5, 12])
def test_all_pages_come_back_after_an_error(error, n_passes, params, alone, monkeypatch):
    """In the middle of a pass; and the same cache can be used again."""
    caches, gpt2 = [], paged.gpt2

    def failing(input_ids, pos_ids, mask, kv_caches, *args, **kwargs):
        caches.append(kv_caches)
        if len(caches) > n_passes:
            kv_caches.update(0, *np.ones((2, len(input_ids), 4, input_ids.shape[1], 8)))
            raise error
        return gpt2(input_ids, pos_ids, mask, kv_caches, *args, **kwargs)

    monkeypatch.setattr(paged, "gpt2", failing)
    prompts = [[3] * 20, [3] * 20, [5]]
    with pytest.raises(error):
        paged.generate(prompts, params, N_HEAD, 40, n_pages=6)
    monkeypatch.undo()
    cache = caches[0]
    assert sorted(cache.free) == list(range(6)) and not cache.page_of and not cache.n_users
    requests = [paged.Request(prompt, 40) for prompt in prompts]
    paged.serve(requests, cache, params, N_HEAD, 8, lambda *_: None)
    for request, prompt in zip(requests, prompts):
        np.testing.assert_array_equal(
            request.ids[len(prompt):], v4.generate(*pad_batch([prompt]), params, N_HEAD, 40)[0])


def test_paged_refuses_what_can_never_fit(params, monkeypatch):
    """Before anything runs, with the numbers; and what just fits is served."""
    sizes = counting(paged, monkeypatch)
    for T, n in (10, 72), (3, 0), (0, 3):
        with pytest.raises(ValueError, match=f"request 1: .*n = {n} .*T = {T}:.* n_ctx = 80"):
            paged.generate([[1], [1] * T], params, N_HEAD, [5, n])
    with pytest.raises(ValueError, match=r"request 1: .*n = 21 .*T = 12:.*= 4 \* 7"):
        paged.generate([[1], [1] * 12], params, N_HEAD, [5, 21], n_pages=4, page_size=7)
    for wrong in {"n_pages": 0}, {"page_size": 0}, {"max_batch": 0}, {"n_pages": -3}:
        (name, value), = wrong.items()
        with pytest.raises(ValueError, match=f"{name} is {value}, but must be"):
            paged.generate([[1]], params, N_HEAD, 5, **wrong)
    with pytest.raises(ValueError):
        paged.generate([[1], [2], [3]], params, N_HEAD, [5, 6])
    assert sizes == []
    actual = paged.generate([[1], [1] * 12], params, N_HEAD, [5, 17], n_pages=4, page_size=7)
    np.testing.assert_array_equal(
        actual[1], v4.generate(*pad_batch([[1] * 12]), params, N_HEAD, 17)[0])
    assert "n_pages * page_size = 2 * 16" in refused("paged", "Once", "--n_pages", "2")


def test_paged_bytes():
    cache = paged.PagedKVCache(3, 4, 8, n_pages=5, page_size=6)
    assert cache.nbytes == v4.kv_cache_bytes(3, 1, 5 * 6, 4, 8)


def test_paged_from_the_command_line(tiny):
    encoder, hparams, params = tiny
    texts = ["Once upon a time", "The king"]
    prompts = [encoder.encode(text) for text in texts]
    new_ids = v4.generate(*pad_batch(prompts), params, hparams["n_head"], 20)
    status, text, lines = run("paged", *texts, "-n", "20", "--page_size", "8")
    assert (status, text) == (0, printed(texts, new_ids, encoder))
    assert lines[-1] == "21 passes; at most 6 pages in use at a time"
