"""Folders as people have them: ids, texts, logits and tokens are those of Transformers.

tests/data/make_folders.py made the folders, and what is expected of them, with Transformers.
"""
import json
import shutil

import numpy as np
import pytest

import gpt2_v1
import gpt2_v4_prealloc
import hub
import utils
from conftest import ROOT
from encoder import load_encoder
from utils import load_encoder_hparams_and_params

FOLDERS = ROOT / "tests" / "data" / "folders"
KINDS = sorted(path.name for path in FOLDERS.iterdir())


def expected(kind):
    return json.loads((FOLDERS / kind / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_ids(kind):
    encoder = load_encoder(FOLDERS / kind)
    assert [[text, encoder.encode(text)] for text, _ in expected(kind)["texts"]] == (
        expected(kind)["texts"])


@pytest.mark.parametrize("kind", KINDS)
def test_texts(kind):
    """Ids without a token, of which padded vocabularies have some, are no text."""
    encoder = load_encoder(FOLDERS / kind)
    assert [[ids, encoder.decode(ids)] for ids, _ in expected(kind)["decoded"]] == (
        expected(kind)["decoded"])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens(kind):
    _, hparams, params = load_encoder_hparams_and_params(FOLDERS / kind)
    prompt, greedy, logits = (expected(kind)[name] for name in ("prompt", "greedy", "logits"))
    n_head = hparams["n_head"]
    actual = gpt2_v1.gpt2(prompt, **params, n_head=n_head)[-1]
    np.testing.assert_allclose(actual, logits, rtol=0, atol=1e-4)
    batch = gpt2_v4_prealloc.pad_batch([prompt])
    assert gpt2_v4_prealloc.generate(*batch, params, n_head, len(greedy)).tolist() == [greedy]


def test_an_added_token_is_literal():
    """č, which in files stands for the byte of a carriage return, is just č there."""
    encoder = load_encoder(FOLDERS / "added_tokens")
    ids = encoder.encode("a kočka č two words")
    assert encoder.decode(ids) == "a kočka č two words"
    assert encoder.ids["kočka"] in ids and encoder.ids["two words"] not in ids  # "two wo" is first


def test_a_byte_without_a_token():
    """tokenizers would leave it out without a word."""
    encoder = load_encoder(FOLDERS / "part_of_the_alphabet")
    with pytest.raises(ValueError, match="without the byte 0x7A, so it can't encode ' zoo'"):
        encoder.encode("the zoo")


# begin and end tokens: what generation_config.json and config.json say (None: the key is missing),
# in a model of 280 tokens, of which <|endoftext|> has the id 0
@pytest.mark.parametrize("generation, config, begin, ends", [
    ({"bos_token_id": 5, "eos_token_id": [6, 7]}, {"bos_token_id": 8, "eos_token_id": 9},
     5, [6, 7]),
    ({"eos_token_id": 6}, {"bos_token_id": 8, "eos_token_id": 9}, 8, [6]),
    (None, {"bos_token_id": 8, "eos_token_id": [9, 10]}, 8, [9, 10]),
    ({}, {}, 0, [0]),
    ({"bos_token_id": None, "eos_token_id": None}, {"bos_token_id": None}, 0, [0]),
    ({"bos_token_id": 50256, "eos_token_id": 50256}, {"eos_token_id": 50256}, 0, [0]),
    ({"eos_token_id": [50256, 6]}, {"bos_token_id": 279}, 279, [6]),
    ({"eos_token_id": 50256}, {"eos_token_id": 9}, 0, [9]),
    ({"eos_token_id": 280, "bos_token_id": 280}, {}, 0, [0]),
    ({"eos_token_id": 0, "bos_token_id": 0}, {"eos_token_id": 9, "bos_token_id": 9}, 0, [0]),
    ({"bos_token_id": [5, 6], "eos_token_id": []}, {"eos_token_id": 9}, 5, [9]),
])
def test_where_texts_begin_and_end(tmp_path, generation, config, begin, ends):
    folder = shutil.copytree(FOLDERS / "tokenizer_json", tmp_path / "m")
    old = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del old["bos_token_id"], old["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(old | config))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    if generation is None:
        (folder / "generation_config.json").unlink()
    encoder, _, _ = load_encoder_hparams_and_params(folder)
    assert (encoder.bos_token_id, encoder.eos_token_ids) == (begin, ends)


def test_neither_begin_nor_end():
    encoder = load_encoder_hparams_and_params(FOLDERS / "no_end_of_text")[0]
    assert (encoder.bos_token_id, encoder.eos_token_ids, encoder.end_of_text) == (None, [], None)


def test_settings_that_ask_for_nothing(tmp_path):
    """Transformers 4 wrote them all, with the values that mean greedy decoding."""
    folder = shutil.copytree(FOLDERS / "tokenizer_json", tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({
        "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "top_k": 50,
        "bad_words_ids": None, "suppress_tokens": [], "do_sample": True, "temperature": 0.7}))
    load_encoder_hparams_and_params(folder)


def test_a_config_that_is_silent(tmp_path):
    """Then a value is that of Transformers' GPT2Config(), whatever its name."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4}')
    config = utils.load_config(tmp_path / "config.json")
    assert {key: config[key] for key in ("vocab_size", "n_positions", "n_embd", "n_head", "n_layer",
                                         "n_inner", "tie_word_embeddings")} == {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 64, "n_head": 4, "n_layer": 12,
        "n_inner": None, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "n_embd": 32}')
    with pytest.raises(ValueError, match="hidden_size is 64, but n_embd is 32"):
        utils.load_config(tmp_path / "config.json")


def slow_clock(monkeypatch, seconds):
    """A clock for the bar, which goes on by so much whenever somebody looks at it."""
    now = iter(range(10**6))
    monkeypatch.setattr("tqdm.std.time", lambda: next(now) * seconds)


@pytest.mark.parametrize("kind", ["tokenizer_json", "shards_bfloat16"])
@pytest.mark.parametrize("seconds, is_shown", [(0.5, True), (1e-4, False)])
def test_a_bar_for_long_reads_alone(monkeypatch, capsys, kind, seconds, is_shown):
    """Of more than a second; it counts bytes, all of them in the end."""
    slow_clock(monkeypatch, seconds)
    load_encoder_hparams_and_params(FOLDERS / kind)
    stderr = capsys.readouterr().err
    assert ("reading the weights: 100%" in stderr and "B/s" in stderr) == is_shown
    assert is_shown or stderr == ""


def put_into_cache(cache, repo, folder, revision="0123abc"):
    """As huggingface_hub lays it out."""
    in_cache = cache / f"models--{repo.replace('/', '--')}"
    (in_cache / "refs").mkdir(parents=True)
    (in_cache / "refs" / "main").write_text(revision)
    return shutil.copytree(folder, in_cache / "snapshots" / revision)


@pytest.mark.parametrize("model, repo", [
    ("some.one/model", "some.one/model"), ("gpt2", "openai-community/gpt2"),
    ("124M", "openai-community/gpt2"), ("openai-community/gpt2", "openai-community/gpt2"),
    ("distilgpt2", "distilgpt2"), ("345M", "gpt2-medium")])
@pytest.mark.parametrize("variables", [
    {"HF_HUB_CACHE": "{}"}, {"HF_HOME": "{}/.."}, {"HOME": "{}"}])
def test_from_the_cache_of_the_hub(tmp_path, monkeypatch, model, repo, variables):
    """What is in it is used from there; nobody answers at the address that it would come from."""
    cache = tmp_path / {"HOME": ".cache/huggingface/hub"}.get(*variables, "hub")
    found = put_into_cache(cache, repo, FOLDERS / "tokenizer_json")
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path if name == "HOME" else cache))
    assert utils.find_model(model, tmp_path / "models").resolve() == found.resolve()
    assert not (tmp_path / "models").exists()


def test_what_is_broken_in_the_cache_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = put_into_cache(tmp_path, "a/b", FOLDERS / "tokenizer_json")
    assert hub.find_in_cache("a/b") == found
    (found / "model.safetensors").unlink()
    assert hub.find_in_cache("a/b") is None
    for revision in "../../elsewhere", "", "gone":
        shutil.rmtree(tmp_path / "models--a--b")
        put_into_cache(tmp_path, "a/b", FOLDERS / "tokenizer_json")
        (tmp_path / "models--a--b" / "refs" / "main").write_text(revision)
        assert hub.find_in_cache("a/b") is None


def test_a_model_here_comes_before_the_cache(tmp_path, monkeypatch):
    """Under its own name, or under OpenAI's."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    put_into_cache(tmp_path / "cache", "openai-community/gpt2", FOLDERS / "tokenizer_json")
    shutil.copytree(FOLDERS / "old_layout", tmp_path / "models" / "124M")
    for model in "124M", "gpt2", "openai-community/gpt2":
        assert utils.find_model(model, tmp_path / "models") == tmp_path / "models" / "124M"


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline(tmp_path, monkeypatch, value):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    with pytest.raises(hub.DownloadError, match="HF_HUB_OFFLINE"):
        utils.find_model("gpt2", tmp_path / "models")
    assert not (tmp_path / "models").exists()
