"""Model folders: what loads, bit by bit, and what is refused, and how."""
import json
import shutil

import numpy as np
import pytest

from conftest import ROOT
from helpers import NUMBER_TYPES, make_hparams, random_tensors, to_params, write_safetensors
from utils import find_model, load_encoder_hparams_and_params, load_params

TINY = ROOT / "models" / "tiny"
HPARAMS = make_hparams(n_vocab=23, n_ctx=8, n_embd=6, n_head=2, n_layer=2)


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(HPARAMS)


def leaves(node):
    """All arrays of nested params, in order."""
    if isinstance(node, np.ndarray):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [leaf for child in children for leaf in leaves(child)]


def assert_same(actual, expected):
    assert actual.keys() == expected.keys() and len(actual["blocks"]) == len(expected["blocks"])
    np.testing.assert_array_equal(actual["wte"], expected["wte"])
    np.testing.assert_array_equal(actual["wpe"], expected["wpe"])
    for actual_part, expected_part in zip([actual["ln_f"], *actual["blocks"]],
                                          [expected["ln_f"], *expected["blocks"]]):
        np.testing.assert_equal(actual_part, expected_part)


@pytest.mark.parametrize("pad", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("number_type", NUMBER_TYPES)
def test_number_types_names_and_alignments(tmp_path, tensors, number_type, prefix, pad):
    """The values are those of the narrower type, exactly; the arrays are float32 and aligned."""
    write_safetensors(tmp_path / "x", tensors, number_type, prefix, pad)
    params = load_params(tmp_path / "x", HPARAMS)
    narrow = {"F32": lambda t: t, "F16": lambda t: t.astype(np.float16).astype(np.float32),
              # bfloat16 is float32 with the lower 16 bits gone
              "BF16": lambda t: (t.view(np.uint32) & 0xFFFF0000).view(np.float32)}[number_type]
    assert_same(params, to_params({name: narrow(tensor) for name, tensor in tensors.items()}))
    for array in leaves(params):
        assert array.dtype == np.float32
        assert array.flags.aligned and array.flags.c_contiguous and array.flags.writeable


def test_mask_buffers_are_ignored(tmp_path, tensors):
    """OpenAI's file keeps the causal mask of each layer."""
    buffers = {"h.0.attn.bias": np.tri(8, dtype=np.float32).reshape(1, 1, 8, 8),
               "h.0.attn.masked_bias": np.array(-1e4, dtype=np.float32)}
    write_safetensors(tmp_path / "x", buffers | tensors)
    assert_same(load_params(tmp_path / "x", HPARAMS), to_params(tensors))


def test_lm_head(tmp_path, tensors):
    head = {"lm_head.weight": tensors["wte.weight"]}
    write_safetensors(tmp_path / "x", tensors | head)
    assert_same(load_params(tmp_path / "x", HPARAMS), to_params(tensors))
    write_safetensors(tmp_path / "x", tensors | {"lm_head.weight": tensors["wte.weight"] + 1})
    with pytest.raises(ValueError, match="lm_head.weight"):
        load_params(tmp_path / "x", HPARAMS)


def test_bundled_model(tiny):
    encoder, hparams, params = tiny
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert hparams == {"n_vocab": config["vocab_size"], "n_ctx": config["n_positions"],
                       "n_embd": config["n_embd"], "n_head": config["n_head"],
                       "n_layer": config["n_layer"]}
    assert len(encoder.tokens) == hparams["n_vocab"]
    assert sum(array.nbytes for array in leaves(params)) > 10_000_000
    assert all(array.dtype == np.float32 for array in leaves(params))
    assert (TINY / "model.safetensors").stat().st_size < 10_000_000


def test_a_missing_or_misshapen_tensor(tmp_path, tensors):
    for name in "wte.weight", "h.1.mlp.c_proj.bias", "ln_f.bias":
        write_safetensors(tmp_path / "x", {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(ValueError, match=f"no tensor {name}"):
            load_params(tmp_path / "x", HPARAMS)
        write_safetensors(tmp_path / "x", tensors | {name: tensors[name][:-1]})
        with pytest.raises(ValueError, match=f"{name} is "):
            load_params(tmp_path / "x", HPARAMS)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_a_file_that_is_cut_off(tmp_path, tensors, keep):
    write_safetensors(tmp_path / "x", tensors)
    content = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(content[:keep])
    with pytest.raises(ValueError, match="cut off|JSON"):
        load_params(tmp_path / "x", HPARAMS)


def test_another_file_in_its_place(tmp_path):
    (tmp_path / "x").write_bytes(b"<!DOCTYPE html><title>404</title>" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_params(tmp_path / "x", HPARAMS)


def test_another_number_type(tmp_path, tensors):
    write_safetensors(tmp_path / "x", tensors)
    content = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(content.replace(b'"F32"', b'"I32"'))
    with pytest.raises(ValueError, match="wte.weight is I32"):
        load_params(tmp_path / "x", HPARAMS)


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model, in a models folder of its own."""
    return shutil.copytree(TINY, tmp_path / "models" / "copy")


def test_models_by_name_and_by_folder(folder, monkeypatch):
    models_dir = folder.parent
    assert find_model("copy", models_dir) == folder
    assert find_model(folder, models_dir) == find_model(str(folder), models_dir) == folder
    monkeypatch.chdir(folder)
    assert find_model(".", models_dir).resolve() == folder
    monkeypatch.chdir(folder.parent.parent)
    assert find_model("models/copy").resolve() == folder
    (folder.parent / "half").mkdir()
    (folder.parent / "half" / "config.json").write_text("{}")
    for name in "tiny", "half", "no such model":
        with pytest.raises(FileNotFoundError, match=f"(?s){name}.* has copy, "):
            find_model(name, models_dir)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json", "merges.txt"])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_encoder_hparams_and_params(folder)


@pytest.mark.parametrize("change, message", [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"activation_function": "relu"}, "activation_function is 'relu'"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ({"scale_attn_weights": False}, "scale_attn_weights is False"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ({"n_head": 3}, "n_head 3 does not divide n_embd"),
    ({"n_head": 0}, "n_head is 0"),
    ({"n_layer": "4"}, "n_layer is '4'"),
    ({"n_positions": None}, "n_positions is None"),
    ({"vocab_size": 50257}, "2048 tokens, config.json says 50257"),
    ({"n_embd": 512}, r"wte.weight is \[2048, 256\]"),
    ({"n_layer": 5}, "no tensor h.4.ln_1.weight"),
])
def test_a_config_that_does_not_fit(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change))
    with pytest.raises(ValueError, match=message) as error:
        load_encoder_hparams_and_params(folder)
    assert str(folder) in str(error.value)
