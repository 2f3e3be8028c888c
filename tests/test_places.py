"""Which of several files, folders and variables counts; and what a folder may be made of."""
import json
import shutil

import numpy as np
import pytest

import hub
import utils
from helpers import random_tensors, write_safetensors
from test_bad_folders import FIRST, FOLDERS, SECOND, index, put, refused, rewrite
from test_folders import put_into_cache, slow_clock
from test_loader import HPARAMS
from utils import find_model, load_encoder_hparams_and_params, load_params

WEIGHTS = hub.WEIGHTS


@pytest.fixture
def folder(tmp_path):
    return lambda kind, name="model": shutil.copytree(FOLDERS / kind, tmp_path / name)


@pytest.mark.parametrize("alias, key", [
    ("max_position_embeddings", "n_positions"), ("hidden_size", "n_embd"),
    ("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer")])
def test_aliases(tmp_path, alias, key):
    (tmp_path / "config.json").write_text(json.dumps({alias: 24}))
    assert utils.load_config(tmp_path / "config.json")[key] == 24


@pytest.mark.parametrize("change", [
    {"activation_function": "gelu_pytorch_tanh"}, {"activation_function": "gelu_new"},
    {"n_inner": None}, {"n_inner": 32}, {"max_position_embeddings": 32}])
def test_what_a_config_may_say(folder, change):
    copied = folder("tokenizer_json")
    rewrite(copied / "config.json", lambda file: file.update(change))
    load_encoder_hparams_and_params(copied)


@pytest.mark.parametrize("value", ["", False, {}])
def test_no_token_id(folder, value):
    copied = folder("tokenizer_json")
    rewrite(copied / "generation_config.json", put("eos_token_id", value=value))
    assert "not a token id" in refused(copied)


def test_one_file_comes_before_an_index(folder):
    copied = folder("tokenizer_json")
    (copied / hub.INDEX).write_text('{"weight_map": {"wte.weight": "gone.safetensors"}}')
    load_encoder_hparams_and_params(copied)


def test_a_tensor_in_another_shard_than_the_index_says(folder):
    copied = folder("shards_bfloat16")
    names = [*index["weight_map"].values()]
    some = max(set(names), key=names.count)
    tensor = next(t for t, name in index["weight_map"].items() if name == some)
    other = next(name for name in (FIRST, SECOND) if name != some)
    rewrite(copied / hub.INDEX, put("weight_map", tensor, value=other))
    assert "which does not have it" in refused(copied)


def test_the_models_folder_comes_first(folder, tmp_path, monkeypatch):
    """Of two whole ones, and of two that are half."""
    folder("tokenizer_json", "m"), folder("tokenizer_json", "models/m")
    monkeypatch.chdir(tmp_path)
    assert find_model("m", tmp_path / "models") == tmp_path / "models" / "m"
    for path in tmp_path / "m", tmp_path / "models" / "m":
        (path / WEIGHTS).unlink()
        assert find_model("m", tmp_path / "models") == tmp_path / "models" / "m"


def test_a_safetensors_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        find_model("x/model.safetensors", tmp_path)


def test_a_broken_index_beside_other_models(folder, tmp_path):
    folder("tokenizer_json", "models/whole")
    (folder("shards_bfloat16", "models/broken") / hub.INDEX).write_text("{")
    with pytest.raises(FileNotFoundError, match="has whole;"):
        find_model("none", tmp_path / "models")


@pytest.mark.parametrize("name", [".x.safetensors", "ä.safetensors", "x.bin", "a b.safetensors",
                                  "x" * 300 + ".safetensors", "x.safetensors\n",
                                  "x.safetensors.part"])
def test_names_in_an_index(folder, name):
    copied = folder("shards_bfloat16")
    rewrite(copied / hub.INDEX, lambda file: file["weight_map"].update(x=name))
    assert "which is not the name of a .safetensors file" in refused(copied)


def test_pickles(folder):
    copied = folder("tokenizer_json")
    (copied / WEIGHTS).rename(copied / "pytorch_model-00001-of-00002.bin")
    assert "pytorch_model-00001-of-00002.bin only, a pickle" in refused(copied)
    (copied / "config.json").unlink()
    assert "it has no config.json" in refused(copied)


@pytest.mark.parametrize("kind, name", [
    ("tokenizer_json", "generation_config.json"), ("tokenizer_json", "tokenizer_config.json"),
    ("tokenizer_json", "tokenizer.json"), ("old_added_tokens", "added_tokens.json")])
def test_pointers_in_the_place_of_other_files(folder, kind, name):
    copied = folder(kind)
    (copied / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "git lfs pull" in refused(copied)


@pytest.mark.parametrize("size, name", [
    ("355M", "gpt2-medium"), ("774M", "gpt2-large"), ("1558M", "gpt2-xl")])
def test_all_sizes_that_are_there(folder, tmp_path, size, name):
    found = folder("tokenizer_json", f"models/{size}")
    assert find_model(name, tmp_path / "models") == found


def test_half_a_download_and_the_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    found = put_into_cache(tmp_path / "cache", "openai-community/gpt2", FOLDERS / "tokenizer_json")
    (folder("tokenizer_json", "models/124M") / WEIGHTS).unlink()
    assert find_model("gpt2", tmp_path / "models") == found


def test_variables_of_the_cache(tmp_path, monkeypatch):
    found = put_into_cache(tmp_path / "hub", "a/b", FOLDERS / "tokenizer_json")
    (tmp_path / "hub" / "models--a--b" / "refs" / "main").write_text("0123abc\n")
    monkeypatch.setenv("HF_HUB_CACHE", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert hub.find_in_cache("a/b") == found
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    assert hub.find_in_cache("a/b") == found
    home = tmp_path / ".cache" / "huggingface" / "hub"
    home = put_into_cache(home, "a/b", FOLDERS / "tokenizer_json")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "")
    monkeypatch.setenv("HF_HUB_CACHE", "")
    assert hub.find_in_cache("a/b") == home


def test_the_bar_does_not_count_masks(tmp_path, monkeypatch, capsys):
    slow_clock(monkeypatch, 0.5)
    tensors = random_tensors(HPARAMS) | {"h.0.attn.bias": np.zeros((99, 99), np.float32)}
    write_safetensors(tmp_path / "x", tensors)
    load_params(tmp_path / "x", HPARAMS)
    assert "reading the weights: 100%" in capsys.readouterr().err


def test_a_revision_outside_of_the_cache(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(tmp_path))
        found = put_into_cache(tmp_path, "a/b", FOLDERS / "tokenizer_json")
        shutil.copytree(found, tmp_path / "elsewhere")
        (tmp_path / "models--a--b" / "refs" / "main").write_text("../../elsewhere")
        assert hub.find_in_cache("a/b") is None
