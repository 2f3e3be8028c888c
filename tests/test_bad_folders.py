"""Whatever stands in a folder's files, loading it ends in a model, or in one line that names it."""
import copy
import json
import random
import re
import shutil

import pytest

import hub
from conftest import ROOT
from utils import load_encoder_hparams_and_params

FOLDERS = ROOT / "tests" / "data" / "folders"
MODERN, OLD, SHARDS = "tokenizer_json", "old_added_tokens", "shards_bfloat16"
ADDED = {"id": 280, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}


def put(*keys, value):
    """An edit that puts a value where the keys lead."""
    def edit(file):
        for key in keys[:-1]:
            file = file[key]
        file[keys[-1]] = value
    return edit


def without(*keys):
    def edit(file):
        for key in keys[:-1]:
            file = file[key]
        del file[keys[-1]]
    return edit


def add_token(**change):
    return lambda file: file["added_tokens"].append(ADDED | change)


def without_a_byte(setting, value):
    """The last byte loses its token, and a setting of the model says what happens then."""
    def edit(file):
        file["model"]["vocab"]["<0>"] = file["model"]["vocab"].pop("ł")
        file["model"][setting] = value
    return edit


def swap(old, new):
    return lambda file: (file.clear(), file.update({"weight_map": {
        tensor: name.replace(old, new) for tensor, name in index["weight_map"].items()}}))


index = json.loads((FOLDERS / SHARDS / hub.INDEX).read_text(encoding="utf-8"))
FIRST, SECOND, THIRD = sorted(set(index["weight_map"].values()))
ONE_OF_FIRST = next(tensor for tensor, name in index["weight_map"].items() if name == FIRST)

JSON_FAULTS = [  # (folder, file, edit, what the line says)
    (MODERN, "tokenizer.json", put("model", "type", value="WordPiece"),
     "model.type is 'WordPiece'"),
    (MODERN, "tokenizer.json", put("model", value=None), "no merges"),
    (MODERN, "tokenizer.json", without("model", "merges"), "no merges"),
    (MODERN, "tokenizer.json", without("model", "vocab"), "vocabulary is not an object"),
    (MODERN, "tokenizer.json", put("normalizer", value={"type": "NFC"}), "normalizer is .*NFC"),
    (MODERN, "tokenizer.json", put("pre_tokenizer", value=None), "pre_tokenizer.type is None"),
    (MODERN, "tokenizer.json", put("pre_tokenizer", "type", value="Whitespace"), "'Whitespace'"),
    (MODERN, "tokenizer.json", put("pre_tokenizer", "use_regex", value=False),
     "use_regex is False"),
    (MODERN, "tokenizer.json", put("pre_tokenizer", "add_prefix_space", value=True),
     "add_prefix_space is True"),
    (MODERN, "tokenizer.json", without("pre_tokenizer", "add_prefix_space"),
     "add_prefix_space is "),
    (MODERN, "tokenizer.json", put("decoder", "type", value="WordPiece"), "decoder.type is"),
    (MODERN, "tokenizer.json", put("model", "dropout", value=0.1), "model.dropout is 0.1"),
    (MODERN, "tokenizer.json", put("model", "ignore_merges", value=True), "ignore_merges is True"),
    (MODERN, "tokenizer.json", put("model", "continuing_subword_prefix", value="##"),
     "prefix is '##'"),
    (MODERN, "tokenizer.json", put("model", "end_of_word_suffix", value="</w>"),
     "suffix is '</w>'"),
    (MODERN, "tokenizer.json", without_a_byte("unk_token", "<|endoftext|>"), "unk_token is '<|end"),
    (MODERN, "tokenizer.json", without_a_byte("byte_fallback", True), "byte_fallback is True"),
    (MODERN, "tokenizer.json", put("model", "merges", 0, value=["t"]), "not a merge of two"),
    (MODERN, "tokenizer.json", put("model", "merges", 0, value="t h e"), "not a merge of two"),
    (MODERN, "tokenizer.json", put("model", "merges", 0, value=["t", 5]), "not a merge of two"),
    (MODERN, "tokenizer.json", put("model", "merges", 0, value="q q"), "needs a token 'qq'"),
    (MODERN, "tokenizer.json", put("model", "merges", 0, value="ab c"), "needs a token 'ab'"),
    (MODERN, "tokenizer.json", put("model", "vocab", "!", value=5), "id 5 stands for two tokens"),
    (MODERN, "tokenizer.json", put("model", "vocab", "!", value=1.0), "'!' has 1.0 for an id"),
    (MODERN, "tokenizer.json", put("model", "vocab", "new", value=280),
     "'new' has the id 280, .* 280 rows"),
    (MODERN, "tokenizer.json", put("added_tokens", value={"a": 1}), "added_tokens are not a list"),
    (MODERN, "tokenizer.json", add_token(id=0),
     "<x>.* has the id 0, but Transformers gives it 280"),
    (MODERN, "tokenizer.json", add_token(), "'<x>' has the id 280, .* 280 rows"),
    (MODERN, "tokenizer.json", add_token(id=300), "has the id 300, but Transformers gives it 280"),
    (MODERN, "tokenizer.json", add_token(id="280"), "not an added token"),
    (MODERN, "tokenizer.json", add_token(content=""), "not an added token"),
    (MODERN, "tokenizer.json", add_token(lstrip=1), "not an added token"),
    (MODERN, "tokenizer.json", add_token(content="!", id=5), "two tokens|two ids"),
    (MODERN, "tokenizer.json", add_token(content="<|endoftext|>", id=0), "is there twice"),
    (MODERN, "tokenizer_config.json", put("split_special_tokens", value=True), "split_special"),
    (MODERN, "tokenizer_config.json", put("add_prefix_space", value=True), "add_prefix_space"),
    (MODERN, "tokenizer_config.json", put("added_tokens_decoder", value={"280": ADDED}),
     "not those of tokenizer_config.json"),
    (MODERN, "tokenizer_config.json", put("added_tokens_decoder", value=[1]), "not an object"),
    (MODERN, "tokenizer_config.json", put("pad_token", value="<new>"), "'<new>' has the id 280"),
    (MODERN, "tokenizer_config.json", put("tokenizer_class", value="LlamaTokenizer"), "'LlamaT"),
    (MODERN, "tokenizer_config.json", put("fast_tokenizer_files", value=["x"]), "fast_tokenizer_f"),
    (OLD, "tokenizer_config.json", put("tokenizer_class", value="RobertaTokenizer"), "'RobertaT"),
    ("old_layout", "config.json", put("tokenizer_class", value="CLIPTokenizer"), "'CLIPTokenizer'"),
    (OLD, "added_tokens.json", put("<|user|>", value=290), "added_tokens.json: .*290, but Transf"),
    (OLD, "added_tokens.json", put("<pad>", value="280"), "not an added token"),
    (OLD, "added_tokens.json", put("the", value=5), "stands for two tokens|two ids"),
    (OLD, "vocab.json", put("!", value=5), "id 5 stands for two tokens"),
    ("old_layout", "vocab.json", without("the"), "needs a token 'the'"),
    (OLD, "tokenizer_config.json", put("added_tokens_decoder", value={"x": ADDED}), "not an added"),
    (OLD, "tokenizer_config.json", put("added_tokens_decoder", value={"280": 5}), "not an added"),
    (MODERN, "config.json", put("model_type", value="llama"), "model_type is 'llama'"),
    (MODERN, "config.json", put("add_cross_attention", value=True), "add_cross_attention is True"),
    (MODERN, "config.json", put("tie_word_embeddings", value=False), "no tensor lm_head.weight"),
    (MODERN, "config.json", put("is_causal", value=False), "is_causal is False"),
    (MODERN, "config.json", put("sliding_window", value=8), "sliding_window is 8"),
    (MODERN, "config.json", put("transformers_weights", value="x.safetensors"), "_weights is 'x"),
    ("old_layout", "generation_config.json", put("num_beams", value=4), "num_beams is 4, which ch"),
    (MODERN, "generation_config.json", put("repetition_penalty", value=1.2), "penalty is 1.2"),
    (MODERN, "generation_config.json", put("suppress_tokens", value=[1]),
     r"suppress_tokens is \[1"),
    (MODERN, "config.json", put("activation_function", value="relu"),
     "activation_function is 'relu'"),
    (MODERN, "config.json", put("layer_norm_epsilon", value=1e-6), "layer_norm_epsilon is 1e-06"),
    (MODERN, "config.json", put("n_inner", value=33), r"c_fc.weight is \[8, 32\], not \[8, 33\]"),
    (MODERN, "config.json", put("n_inner", value=-1), "n_inner is -1"),
    (MODERN, "config.json", put("n_inner", value="32"), "n_inner is '32'"),
    (MODERN, "config.json", put("vocab_size", value=279), "has the id 279, .* 279 rows"),
    (MODERN, "config.json", without("n_embd"), r"wte.weight is \[280, 8\], not \[280, 768\]"),
    (MODERN, "config.json", put("num_attention_heads", value=4),
     "num_attention_heads is 4, but n_head is"),
    (MODERN, "config.json", put("eos_token_id", value="<|endoftext|>"), "eos_token_id is '<|end"),
    (MODERN,
     "generation_config.json", put("eos_token_id", value=[0, -1]), r"eos_token_id is \[0, -1"),
    (MODERN, "generation_config.json", put("bos_token_id", value=1.5), "bos_token_id is 1.5"),
    (SHARDS, hub.INDEX, without("weight_map"), "no weight_map"),
    (SHARDS, hub.INDEX, put("weight_map", value={}), "no weight_map"),
    (SHARDS, hub.INDEX, put("weight_map", ONE_OF_FIRST, value="../" + FIRST), "in the same folder"),
    (SHARDS, hub.INDEX, put("weight_map", ONE_OF_FIRST, value="/etc/passwd"), "in the same folder"),
    (SHARDS, hub.INDEX, put("weight_map", ONE_OF_FIRST, value="a\\..\\b.safetensors"),
     "same folder"),
    (SHARDS, hub.INDEX, put("weight_map", ONE_OF_FIRST, value=5), "in the same folder"),
    (SHARDS, hub.INDEX, put("weight_map", ONE_OF_FIRST, value=SECOND), "which does not have it"),
    (SHARDS, hub.INDEX, put("weight_map", "h.9.ln_1.bias", value=FIRST), "which does not have it"),
    (SHARDS, hub.INDEX, swap(THIRD, "gone.safetensors"), "incomplete: it has no gone.safetensors"),
    (SHARDS, hub.INDEX, swap(THIRD, SECOND), "which does not have it"),
]
FOLDER_FAULTS = [  # (folder, what to do with it, what the line says)
    (MODERN, lambda folder: (folder / "added_tokens.json").write_text('{"foo": 280}'),
     "not those of added_tokens.json"),
    (MODERN, lambda folder: (folder / "special_tokens_map.json").write_text('{"pad_token": "<p>"}'),
     "'<p>' has the id 280, .* 280 rows"),
    (SHARDS, lambda folder: (folder / "generation_config.json").unlink() or rewrite(
        folder / "config.json", put("no_repeat_ngram_size", value=2)),
     "config.json: no_repeat_ngram"),
    (MODERN, lambda folder: (folder / "tokenizer.json").unlink(), "no vocab.json .nor a tokenizer"),
    (OLD, lambda folder: (folder / "merges.txt").unlink(), "it has no merges.txt"),
    (MODERN, lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    (MODERN, lambda folder: (folder / "model.safetensors").unlink(), "it has no model.safetensors"),
    (MODERN, lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
     "pickle, which can run any code .* GPT2LMHeadModel.from_pretrained.* model.save_pretrained"),
    (SHARDS, lambda folder: (folder / SECOND).unlink(), f"it has no {SECOND}"),
    (SHARDS, lambda folder: shutil.copy(folder / FIRST, folder / SECOND), "has .*, and so has"),
    (SHARDS, lambda folder: (folder / FIRST).write_bytes(b""), f"{FIRST} is empty"),
    (OLD, lambda folder: (folder / "merges.txt").write_text("t h e\n"), "line 1: 't h e' is not"),
]


@pytest.fixture
def folder(tmp_path):
    """A function that copies one of the folders."""
    return lambda kind: shutil.copytree(FOLDERS / kind, tmp_path / "model")


def refused(folder):
    """The line that a folder is refused with; it names the folder, or a file in it."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_encoder_hparams_and_params(folder)
    assert str(folder) in str(error.value)
    return str(error.value)


def rewrite(path, edit):
    file = json.loads(path.read_text(encoding="utf-8"))
    edit(file)
    path.write_text(json.dumps(file), encoding="utf-8")


@pytest.mark.parametrize("kind, name, edit, says", JSON_FAULTS,
                         ids=[f"{n}-{name}" for n, (_, name, *_) in enumerate(JSON_FAULTS)])
def test_what_a_file_says_wrong(folder, kind, name, edit, says):
    copied = folder(kind)
    rewrite(copied / name, edit)
    assert re.search(says, refused(copied))


@pytest.mark.parametrize("kind, change, says", FOLDER_FAULTS)
def test_what_is_wrong_with_a_folder(folder, kind, change, says):
    copied = folder(kind)
    change(copied)
    assert re.search(says, refused(copied))


VALUES = [None, True, False, 0, 1, -1, 2, 280, 10**20, 0.5, 1e308, float("nan"), "", "a", "the",
          "<|endoftext|>", "č", "\ud800", "../x", "\0", [], {}, [0], ["a", "b"], {"a": 0}]


def mutate_json(file, rng):
    """Change one thing somewhere in a JSON value: put something else there, move or remove it."""
    places = [(file, key) for key in (file if isinstance(file, dict) else range(len(file)))]
    for parent, key in places:                    # grows meanwhile, by the children of each place
        child = parent[key]
        if isinstance(child, (dict, list)):
            some = list(child) if isinstance(child, dict) else range(len(child))
            places += [(child, key) for key in rng.sample(some, min(len(some), 8))]
    parent, key = rng.choice(places)
    other_parent, other_key = rng.choice(places)
    what = rng.randrange(4)
    if what == 0:
        del parent[key]
    elif what == 1:
        parent[key] = copy.deepcopy(other_parent[other_key])
    elif what == 2 and isinstance(parent, dict):
        parent[rng.choice(["", "a", "the", "<|endoftext|>", "\ud800"])] = parent.pop(key)
    else:
        parent[key] = rng.choice(VALUES)


def mutate_bytes(content, rng):
    """Cut, repeat, change or put in a few bytes."""
    start = rng.randrange(len(content) + 1)
    stop = min(start + rng.choice([0, 1, 1, 2, 8, 1000]), len(content))
    middle = rng.choice([b"", bytes([rng.randrange(256)]), content[start:stop] * 2, b'"', b"{", b"["
                         b"0", b"\n", b" ", b"\xff", b"[" * 10**5, b"9" * 5000])
    return content[:start] + middle + content[stop:]


FUZZED = [(MODERN, "tokenizer.json"), (MODERN, "tokenizer_config.json"), (MODERN, "config.json"),
          (MODERN, "generation_config.json"), (MODERN, "model.safetensors"), (OLD, "vocab.json"),
          (OLD, "merges.txt"), (OLD, "added_tokens.json"), (OLD, "tokenizer_config.json"),
          (SHARDS, hub.INDEX), (SHARDS, FIRST)]


@pytest.mark.parametrize("kind, name", FUZZED)
def test_mutations(folder, kind, name, n=100):
    """Seeded by the file's name, half of them in JSON's terms, half in bytes."""
    copied, rng = folder(kind), random.Random(name)
    path = copied / name
    content = path.read_bytes()
    loaded = 0
    for _ in range(n):
        changed = mutate_bytes(content, rng)
        if name.endswith(".json") and rng.random() < 0.5:
            file = json.loads(content)
            for _ in range(rng.choice([1, 1, 2, 5])):
                mutate_json(file, rng) if file else None
            changed = json.dumps(file, ensure_ascii=rng.random() < 0.5).encode(errors="replace")
        path.write_bytes(changed)
        try:
            encoder, hparams, params = load_encoder_hparams_and_params(copied)
        except (ValueError, FileNotFoundError) as error:
            assert str(copied) in str(error)
        else:
            loaded += 1
            assert encoder.decode(range(hparams["n_vocab"])) and params["wte"].shape[1] == 8
    assert loaded < n
