"""What tokenizer files may say, which of them counts, and how tokens are numbered that have no id.

The rules are those of Transformers 5.24, tried with it.
"""
import json
import shutil

import pytest

from encoder import load_encoder
from test_bad_folders import FOLDERS, put, refused, rewrite, without
from test_encoder import SMALL, small_vocab, write_vocabulary


@pytest.fixture
def folder(tmp_path):
    return lambda kind: shutil.copytree(FOLDERS / kind, tmp_path / "model")


@pytest.mark.parametrize("edit", [
    without("pre_tokenizer", "use_regex"), without("model", "type"),
    put("model", "dropout", value=0),
    put("model", "dropout", value=0.0), without("model", "ignore_merges"), without("decoder"),
    put("model", "continuing_subword_prefix", value=None),
    put("model", "continuing_subword_prefix", value=""),
    put("model", "end_of_word_suffix", value=""), put("model", "unk_token", value="<|endoftext|>"),
    put("model", "byte_fallback", value=True), without("added_tokens")])
def test_what_a_tokenizer_json_may_say(folder, edit):
    copied = folder("tokenizer_json")
    rewrite(copied / "tokenizer.json", edit)
    assert load_encoder(copied).encode("the king<|endoftext|>") == [258, 274, 0]


def set_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("name, is_generic", [
    ("PreTrainedTokenizerFast", True), ("TokenizersBackend", True), ("GPT2Tokenizer", False)])
def test_classes(folder, name, is_generic):
    copied = folder("prefix_space")
    set_config(copied, tokenizer_class=name)
    if is_generic:
        assert load_encoder(copied).add_prefix_space
    else:
        assert "add_prefix_space is True, but not in" in refused(copied)
    rewrite(copied / "tokenizer.json", lambda file: file.update(added_tokens=[]))
    set_config(copied, tokenizer_class=name, add_prefix_space=True)
    assert (load_encoder(copied).encode("<|endoftext|>") == [0]) != is_generic


def decoder_of(folder):
    file = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return {str(entry.pop("id")): entry for entry in file["added_tokens"]}


def test_both_files_have_the_added_tokens(folder):
    """As Transformers 4 wrote them."""
    copied = folder("added_tokens")
    entries = decoder_of(copied)
    rewrite(copied / "tokenizer.json",
            lambda file: file["added_tokens"].insert(0, file["added_tokens"].pop(1)))
    edit = put("added_tokens_decoder", value=entries)
    rewrite(copied / "tokenizer_config.json", edit)
    assert load_encoder(copied).encode("<pad>") == [280]
    entries["280"]["lstrip"] = True
    rewrite(copied / "tokenizer_config.json", edit)
    assert "not those of" in refused(copied)
    rewrite(copied / "tokenizer_config.json", put("added_tokens_decoder", value={}))
    assert "not those of" in refused(copied)


def test_tokenizer_json_comes_first(folder):
    copied = folder("tokenizer_json")
    write_vocabulary(copied, SMALL, small_vocab())
    assert load_encoder(copied).encode("the king") == [258, 274]


def test_added_tokens_decoder_comes_first(folder):
    copied = folder("added_tokens_decoder")
    (copied / "added_tokens.json").write_text('{"<c>": 280}')
    plain = load_encoder(FOLDERS / "old_layout").encode("<c>")
    assert load_encoder(copied).encode("<a><c>") == [280, *plain]


def test_prefix_space_of_the_old_layout(folder):
    copied = folder("old_layout")
    set_config(copied, add_prefix_space=True)
    assert load_encoder(copied).encode("the") == load_encoder(FOLDERS / "old_layout").encode(" the")


def test_named_tokens(folder):
    """Those that are not in the vocabulary get the next ids: roles, then others, then the list."""
    copied = folder("old_layout")
    set_config(copied, image_token="<i>", sep_token={"content": "<s>", "lstrip": True},
               bos_token="the", eos_token="the", pad_token="", extra_special_tokens=["<x>"],
               additional_special_tokens=["<never>"])
    ids = load_encoder(copied).encode("the <s><i><x><|endoftext|><never>")
    assert ids[:5] == [258, 280, 281, 282, 0] and len(ids) > 6
    set_config(copied, additional_special_tokens=["<x>"],
               model_specific_special_tokens={"a": "<a>"})
    assert load_encoder(copied).encode("<a><x><|endoftext|>") == [280, 281, 0]


def test_a_named_token_in_the_vocabulary_takes_no_new_id(folder):
    copied = folder("old_layout")
    set_config(copied, bos_token="the", eos_token="<e>", pad_token="<p>")
    assert load_encoder(copied).encode("<e><p>") == [280, 281]


def test_a_named_token_is_looked_for_first(folder):
    copied = folder("old_layout")
    (copied / "added_tokens.json").write_text('{"a b": 280, "b c": 281}')
    set_config(copied, pad_token="b c")
    assert load_encoder(copied).encode("a b c")[-1] == 281
    set_config(copied)
    assert load_encoder(copied).encode("a b c")[0] == 280
    (copied / "added_tokens.json").write_text('{"a b": 280}')
    set_config(copied, pad_token={"content": "b c", "normalized": True})
    assert load_encoder(copied).encode("a b c")[0] == 280


def test_the_next_id_is_the_size_of_the_vocabulary(tmp_path):
    write_vocabulary(tmp_path, SMALL, small_vocab() | {"more": 300})
    set_config(tmp_path, pad_token="<pad>")
    assert load_encoder(tmp_path).encode("<pad><|endoftext|>") == [261, 259]


def test_no_end_of_text_in_the_old_layout(tmp_path):
    vocab = small_vocab()
    del vocab["<|endoftext|>"]
    write_vocabulary(tmp_path, SMALL, vocab)
    encoder = load_encoder(tmp_path)
    assert encoder.end_of_text is None and encoder.eos_token_ids == []


def test_merges_txt(tmp_path):
    vocab = small_vocab() | {"##": 259, "<|endoftext|>": 260}
    write_vocabulary(tmp_path, SMALL, vocab)
    (tmp_path / "merges.txt").write_text("# #\nh e\n")
    assert load_encoder(tmp_path).encode("##he") == [259, 256]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n#version x\n")
    with pytest.raises(ValueError, match="needs a token '#version'"):
        load_encoder(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\r\nh e\r\n")
    assert load_encoder(tmp_path).encode("he") == [256]


def test_two_spaces_in_a_merge(folder):
    copied = folder("merges_as_text")
    rewrite(copied / "tokenizer.json", put("model", "merges", 0, value="t  h"))
    assert "not a merge of two" in refused(copied)


@pytest.mark.parametrize("text", ["٣", "1234567890", " 280", "-1", ""])
def test_an_id_that_is_no_number(folder, text):
    copied = folder("added_tokens_decoder")
    rewrite(copied / "tokenizer_config.json",
            lambda file: file["added_tokens_decoder"].update(
                {text: file["added_tokens_decoder"].pop("280")}))
    assert "not an added token with an id" in refused(copied)


@pytest.mark.parametrize("section, says", [
    ("decoder", "decoder.type is 'x'"), ("pre_tokenizer", "type is 'x'")])
def test_a_section_that_is_text(folder, section, says):
    copied = folder("tokenizer_json")
    rewrite(copied / "tokenizer.json", put(section, value="x"))
    assert says in refused(copied)
