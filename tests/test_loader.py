"""Model folders: what loads, bit by bit, and what is refused, and how."""
import json
import shutil
import struct

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


def rewrite(path, edit):
    """Let edit change the header, given as a dict, and the data of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = edit(json.loads(content[8:end]), content[end:])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(name, **change):
    """An edit that changes what the header says of a tensor."""
    def edit(header, data):
        header[name] |= change
        return header, data
    return edit


def shift(name, start, end):
    """An edit that moves the data_offsets of a tensor."""
    def edit(header, data):
        offsets = header[name]["data_offsets"]
        header[name]["data_offsets"] = [offsets[0] + start, offsets[1] + end]
        return header, data
    return edit


def replace(name, text):
    """An edit that puts something else into the header."""
    return lambda header, data: (header | {name: text}, data)


BROKEN = {  # what is wrong -> the edit that makes it so, what the message says
    "a byte too few": (lambda header, data: (header, data[:-1]), "cut off"),
    "a byte too many": (lambda header, data: (header, data + b"x"), "damaged"),
    "half": (lambda header, data: (header, data[:len(data) // 2]), "cut off"),
    "no data": (lambda header, data: (header, b""), "cut off"),
    "no JSON": (lambda header, data: (b"{x", data), "header is not JSON"),
    "no UTF-8": (lambda header, data: (b'{"\xff": 1}', data), "header is not JSON"),
    "deep JSON": (lambda header, data: (b"[" * 10**6, data), "header is not JSON"),
    "no object": (lambda header, data: (b"[1, 2]", data), "does not hold a JSON object"),
    "an empty header": (lambda header, data: (b"", data), "header is not JSON"),
    "no entry": (replace("wpe.weight", 5), "wpe.weight, but 5"),
    "an empty entry": (replace("wpe.weight", {}), "wpe.weight, but {}"),
    "no dtype": (replace("wpe.weight", {"shape": [8, 6], "data_offsets": [0, 192]}), "wpe.weight, "),
    "null": (entry("wpe.weight", shape=None), "wpe.weight, but"),
    "a negative size": (entry("wpe.weight", shape=[-8, -6]), "wpe.weight, but"),
    "a size that is text": (entry("wpe.weight", shape=["8", 6]), "wpe.weight, but"),
    "a fraction": (entry("wpe.weight", shape=[8.0, 6.0]), "wpe.weight, but"),
    "one offset": (entry("wpe.weight", data_offsets=[0]), "wpe.weight, but"),
    "a negative offset": (shift("wte.weight", -1, 0), "wte.weight, but"),
    "an offset beyond the data": (shift("ln_f.bias", 10**6, 10**6), "ln_f.bias is said to be at"),
    "an end beyond the data": (shift("ln_f.bias", 0, 10**6), "cut off"),
    "an end before its start": (entry("wte.weight", data_offsets=[552, 0]), "wte.weight is said"),
    "an overlap": (shift("wpe.weight", -4, 0), "wpe.weight is said to be at"),
    "a gap": (shift("wpe.weight", 4, 0), "wpe.weight is said to be at"),
    "the same place twice": (entry("wpe.weight", data_offsets=[0, 192]), "wte.weight is said"),
    "another dtype": (entry("wpe.weight", dtype="I32"), "wpe.weight is I32, not one of F32, F16"),
    "a wider dtype": (entry("wpe.weight", dtype="F64"), "wpe.weight is F64"),
    "a dtype of another size": (entry("wpe.weight", dtype="F16"), "wpe.weight has 192 bytes"),
    "a dtype that is a list": (entry("wpe.weight", dtype=["F32"]), r"wpe.weight is \['F32'\]"),
    "another shape": (entry("wpe.weight", shape=[6, 8]), r"wpe.weight is \[6, 8\], not \[8, 6\]"),
    "fewer axes": (entry("wpe.weight", shape=[48]), r"wpe.weight is \[48\]"),
}


@pytest.mark.parametrize("edit, message", BROKEN.values(), ids=BROKEN)
def test_a_broken_header(tmp_path, tensors, edit, message):
    path = tmp_path / "x"
    write_safetensors(path, tensors)
    rewrite(path, edit)
    with pytest.raises(ValueError, match=message) as error:
        load_params(path, HPARAMS)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 8, 100])
def test_a_file_cut_off_in_its_header(tmp_path, tensors, keep):
    write_safetensors(tmp_path / "x", tensors)
    content = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(content[:keep])
    with pytest.raises(ValueError, match="not a safetensors file, or cut off"):
        load_params(tmp_path / "x", HPARAMS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("number_type", NUMBER_TYPES)
@pytest.mark.parametrize("name", ["wte.weight", "h.1.ln_2.bias"])
def test_no_number(tmp_path, tensors, name, number_type, value):
    broken = tensors[name].copy()
    broken.flat[-1] = value
    write_safetensors(tmp_path / "x", tensors | {name: broken}, number_type)
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        load_params(tmp_path / "x", HPARAMS)


def test_the_largest_numbers(tmp_path, tensors):
    """They are finite, although their difference is not."""
    bias = np.array([3e38, -3e38, 1e-45, -0.0, 0, 1], dtype=np.float32)
    write_safetensors(tmp_path / "x", tensors | {"ln_f.bias": bias})
    assert load_params(tmp_path / "x", HPARAMS)["ln_f"]["b"].tobytes() == bias.tobytes()


@pytest.mark.parametrize("name", ["h.2.ln_1.weight", "h.0.attn.c_attn.lora_A", "score.weight",
                                  "transformer.wte.weight"])
def test_a_tensor_too_many(tmp_path, tensors, name):
    """A third layer, say, although n_layer is 2: the sizes contradict the file."""
    write_safetensors(tmp_path / "x", tensors | {name: np.ones(6, np.float32)})
    with pytest.raises(ValueError, match=f"{name} is not part of a GPT-2 with 2 layers"):
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
    with pytest.raises(FileNotFoundError, match="half is incomplete: it has no vocab.json .nor"):
        load_encoder_hparams_and_params("half", models_dir)
    for name in "tiny", "no such model":
        with pytest.raises(FileNotFoundError, match=f"no model '{name}'; .* has copy; "):
            find_model(name, models_dir)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json", "merges.txt"])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_encoder_hparams_and_params(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json", "merges.txt"])
@pytest.mark.parametrize("content, message", [
    (b"", "empty"),
    (b"\n", "empty"),
    (b"<!DOCTYPE html>\n<html><title>404</title></html>\n", "is a web page"),
    (b"\n<HTML lang=en>", "is a web page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
], ids=["empty", "blank", "HTML", "html", "pointer"])
def test_something_else_in_its_place(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_encoder_hparams_and_params(folder)
    assert str(folder / name) in str(error.value)


@pytest.mark.parametrize("change, message", [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"activation_function": "relu"}, "activation_function is 'relu'"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ({"scale_attn_weights": False}, "scale_attn_weights is False"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ({"n_head": 3}, "n_head 3 does not divide n_embd"),
    ({"n_head": 0}, "n_head is 0"),
    ({"n_layer": "4"}, "n_layer is '4'"),
    ({"n_layer": 4.0}, "n_layer is 4.0"),
    ({"n_positions": None}, "n_positions is None"),
    ({"n_head": True}, "n_head is True"),
    ({"vocab_size": 50257}, r"wte.weight is \[2048, 256\], not \[50257, 256\]"),
    ({"vocab_size": 2047}, "has the id 2047, but .* the model has 2047 rows"),
    ({"n_embd": 512}, r"wte.weight is \[2048, 256\]"),
    ({"n_positions": 511}, r"wpe.weight is \[512, 256\], not \[511, 256\]"),
    ({"n_layer": 5}, "no tensor h.4.ln_1.weight"),
    ({"n_layer": 3}, "h.3.* is not part of a GPT-2 with 3 layers"),
])
def test_a_config_that_does_not_fit(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change))
    with pytest.raises(ValueError, match=message) as error:
        load_encoder_hparams_and_params(folder)
    assert str(folder) in str(error.value)


def test_an_untied_head_that_is_the_same(tmp_path):
    tensors = random_tensors(HPARAMS)
    write_safetensors(tmp_path / "x", tensors | {"lm_head.weight": tensors["wte.weight"]})
    load_params(tmp_path / "x", HPARAMS, tied=False)


@pytest.mark.parametrize("edit, message", [
    (lambda header, data: ({}, b""), "there is no tensor wte.weight"),
    (entry("wte.weight", data_offsets=[False, 552]), "wte.weight, but"),
    (lambda header, data: ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 4]}}, data[:4]),
     "b is said to be at"),
])
def test_headers(tmp_path, edit, message):
    write_safetensors(tmp_path / "x", random_tensors(HPARAMS))
    rewrite(tmp_path / "x", edit)
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path / "x", HPARAMS)


def test_an_lm_head_that_differs_by_a_bit(tmp_path):
    tensors = random_tensors(HPARAMS)
    head = np.nextafter(tensors["wte.weight"], np.float32(9))
    write_safetensors(tmp_path / "x", tensors | {"lm_head.weight": head})
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        load_params(tmp_path / "x", HPARAMS)
