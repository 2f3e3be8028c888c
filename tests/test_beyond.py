"""The files of beyond/: each idea gives what it promises, and nothing else changes."""
import os
import subprocess
import sys

import numpy as np
import pytest

import gpt2_v4_prealloc as v4
from beyond import sampling, speculative
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
