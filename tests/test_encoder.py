"""The ids are those of Hugging Face's tokenizers; what can't be right is refused when read."""
import json

import numpy as np
import pytest

from conftest import ROOT
from encoder import WORD, AddedToken, Encoder, byte_symbols, load_encoder
from helpers import openai_vocab

DATA = ROOT / "tests" / "data"
# [text, ids] from tokenizers, made by tests/data/make_references.py
CASES = json.loads((DATA / "encoder_ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def merges():
    """OpenAI's merges; tests/data/make_references.py says where they come from."""
    lines = (DATA / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    return [line.split(" ") for line in lines[1:] if line]


@pytest.fixture(scope="module")
def openai(merges):
    return Encoder(openai_vocab(merges), merges, [AddedToken("<|endoftext|>", 50256)])


@pytest.mark.parametrize("text, ids", CASES, ids=lambda value: ascii(value)[:40])
def test_ids_of_tokenizers(openai, text, ids):
    assert openai.encode(text) == ids


@pytest.mark.parametrize("text", [text for text, _ in CASES], ids=lambda text: ascii(text)[:40])
def test_round_trip(openai, tiny, text):
    assert openai.decode(openai.encode(text)) == text
    assert tiny[0].decode(tiny[0].encode(text)) == text


def test_published_ids(openai):
    """The text and ids of fastGPT's published example."""
    text = ("Alan Turing theorized that computers would one day become very powerful, but even he "
            "could not imagine")
    ids = [36235, 39141, 18765, 1143, 326, 9061, 561, 530, 1110, 1716, 845, 3665, 11, 475, 772, 339,
           714, 407, 5967]
    assert openai.encode(text) == ids
    assert openai.decode(ids) == text


# 0xFF is the last of the printable bytes: 94 of ASCII, 12 from 0xA1, 82 from 0xAE, so id 187. The
# bytes 0x80 to 0xA0 follow the 33 control characters, 0x7F among them: 188 + 34 + (byte - 0x80).
@pytest.mark.parametrize("raw, ids", [
    (b"\xff", [187]), (b"\xfe\xff\xff", [186, 187, 187]), (b"\x80", [222]),
    (b"a\xffb", [64, 187, 65]), (b" \xff", [220, 187]),
    (b"\xff<|endoftext|>\xff", [187, 50256, 187]),
])
def test_bytes_that_are_no_utf8(openai, raw, ids):
    """They reach Python as surrogate escapes, from the command line for one."""
    assert openai.encode(raw.decode(errors="surrogateescape")) == ids
    assert openai.decode(ids) == raw.decode(errors="replace")


def test_cut_off_characters_become_replacement_characters(openai):
    ids = openai.encode("€")
    for raw in b"\xe2\x82", b"x\xe2\x82", b"\xe2\x82y", b"\xf0\x9f\x99":
        encoded = openai.encode(raw.decode(errors="surrogateescape"))
        assert openai.decode(encoded) == raw.decode(errors="replace")
    assert openai.decode(ids) == "€"


def test_byte_symbols():
    """Printable bytes stand for themselves; in the released vocabulary, Ġ stands for a space."""
    symbols = byte_symbols()
    assert sorted(symbols) == list(range(256)) and len(set(symbols.values())) == 256
    assert symbols[ord("A")] == "A" and symbols[0xFF] == "ÿ"
    assert symbols[ord(" ")] == "Ġ" and symbols[ord("\n")] == "Ċ" and symbols[0xAD] == "Ń"
    assert list(symbols.values()) == sorted(symbols.values())


@pytest.mark.parametrize("word, n_ids, sum_of_ids", [
    ("a" * 100_000, 25_000, 619_850_000),
    ("abcdefghijklmnopqrstuvwxyz" * 3847, 53_858, 462_140_110),
], ids=["a", "alphabet"])
def test_long_word(openai, word, n_ids, sum_of_ids):
    """The numbers are from tokenizers. By scanning all pairs for each merge, it takes minutes."""
    ids = openai.encode(word)
    assert (len(ids), sum(ids)) == (n_ids, sum_of_ids)
    assert openai.decode(ids) == word


def test_ids_without_a_token(openai):
    """They are no text, as in Transformers: a model may have more rows than there are tokens."""
    assert openai.decode([31373, 50257, 995, 10 ** 9]) == "hello world"
    with pytest.raises(ValueError, match="no token id -1"):
        openai.decode([1, -1])


def test_numpy_ids_and_iterators(openai):
    assert openai.decode(np.array([31373, 995])) == "hello world"
    assert openai.decode(iter([31373, 995])) == "hello world"


def write_vocabulary(folder, merges, vocab):
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")


SMALL = [["h", "e"], ["l", "l"], ["he", "ll"]]


def small_vocab():
    """By hand: 256 bytes, "he" 256, "ll" 257, "hell" 258, <|endoftext|> 259."""
    symbols = {symbol: n for n, symbol in enumerate(sorted(byte_symbols().values()))}
    return symbols | {"he": 256, "ll": 257, "hell": 258, "<|endoftext|>": 259}


def test_load_encoder(tmp_path):
    write_vocabulary(tmp_path, SMALL, small_vocab())
    encoder = load_encoder(tmp_path)
    assert encoder.encode("hello he<|endoftext|>") == [258, 78, 220, 256, 259]
    assert encoder.end_of_text == 259


def test_merges_of_number_signs(tmp_path):
    """# begins a header in the first line alone; GPT-2 has merges of number signs."""
    vocab = small_vocab() | {"##": 259, "<|endoftext|>": 260}
    write_vocabulary(tmp_path, [*SMALL, ["#", "#"]], vocab)
    assert load_encoder(tmp_path).encode("##") == [259]


def test_ids_in_any_order(tmp_path):
    """Ids are the vocabulary's, with gaps, and ranks the merges' places; neither follows from the
    other. Of "hell", "ll" is merged first, so that "he" "ll" is a pair; then that."""
    vocab = {token: 3 * (300 - n) for n, token in enumerate(small_vocab())} | {"more": 7}
    write_vocabulary(tmp_path, [SMALL[1], SMALL[0], SMALL[2]], vocab)
    encoder = load_encoder(tmp_path)
    assert encoder.encode("hell he<|endoftext|>") == [3 * (300 - n) for n in (258, 220, 256, 259)]
    assert encoder.decode([3 * (300 - 258), 7, 8]) == "hellmore"


@pytest.mark.parametrize("change, message", [
    ({"<|endoftext|>": 0}, "the id 0 stands for two tokens, '!' and '<|endoftext|>'"),
    ({"more": None}, "'more' has None for an id"),
    ({"more": -1}, "'more' has -1 for an id"),
    ({"more": True}, "'more' has True for an id"),
    ({"more": 260.0}, "'more' has 260.0 for an id"),
    ({"!": "0"}, "'!' has '0' for an id"),
    ({"\ud800": 260}, "surrogate"),
])
def test_a_vocab_that_cannot_be(tmp_path, change, message):
    write_vocabulary(tmp_path, SMALL, small_vocab() | change)
    with pytest.raises(ValueError, match=message) as error:
        load_encoder(tmp_path)
    assert str(tmp_path / "vocab.json") in str(error.value)


def test_vocab_without_a_token(tmp_path):
    vocab = small_vocab()
    del vocab["hell"]
    write_vocabulary(tmp_path, SMALL, vocab)
    with pytest.raises(ValueError, match="'hell'"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("merge, lacks", [
    (["h", "€"], "€"), (["€", "h"], "€"), (["h", "h"], "hh")])
def test_merges_of_unknown_tokens(tmp_path, merge, lacks):
    """Each has to join two tokens of the vocabulary into a third."""
    write_vocabulary(tmp_path, [*SMALL, merge], small_vocab())
    with pytest.raises(ValueError, match=f"merges.txt: the merge .* needs a token '{lacks}'"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("name, content, message", [
    ("merges.txt", b"#version: 0.2\nh e\nhell\n", "line 3"),
    ("merges.txt", b"h e l\n", "line 1"),
    ("merges.txt", b"\xff\xfe", "UTF-8"),
    ("vocab.json", b"\xff\xfe", "UTF-8"),
    ("vocab.json", b"{", "JSON"),
    ("vocab.json", b"[1]", "a JSON object"),
    ("vocab.json", b"", "JSON"),
    ("vocab.json", b'{"a": ' + b"9" * 5000 + b"}", "JSON"),
    ("vocab.json", b"[" * 10**6, "JSON"),
])
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    write_vocabulary(tmp_path, SMALL, small_vocab())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_encoder(tmp_path)
    assert str(tmp_path / name) in str(error.value)


# Encoders of the 256 bytes, whose ids end at 256, and a few tokens; ids and splits are those that
# tokenizers 0.23.3 gives for the same.
@pytest.mark.parametrize("text, words", [
    ("\tthe", ["\t", "the"]), ("1½Ⅷ2", ["1½Ⅷ2"]), ("हि", ["ह", "ि"]), ("aⒶ", ["a", "Ⓐ"]),
    ("'S'Twas I'M", ["'", "S", "'", "Twas", " I", "'", "M"])])
def test_words(text, words):
    """As tokenizers' ByteLevel splits: a letter is \\p{L}, a number \\p{N}, and nothing else is."""
    assert WORD.findall(text) == words


BYTES = openai_vocab([])


@pytest.mark.parametrize("text, ids", [
    ("a\x1f<l>", [64, 219, 257]), ("<l>\x1fa", [257, 219, 64]), ("a\x85<l>\u2028a", [64, 257, 64])])
def test_white_space_beside_an_added_token(text, ids):
    """Unicode's: U+001C to U+001F are none, though Python's str.isspace says so."""
    encoder = Encoder(BYTES, [], [AddedToken("<l>", 257, lstrip=True, rstrip=True)])
    assert encoder.encode(text) == ids


@pytest.mark.parametrize("beside, is_cut", [
    ("_", False), ("1", False), ("\u200d", False), ("Ⓐ", False), ("Ⅷ", False), ("\u0301", False),
    ("²", True), ("½", True), ("-", True)])
def test_a_single_word(beside, is_cut):
    encoder = Encoder(BYTES, [], [AddedToken("word", 257, single_word=True)])
    for text in beside + "word", "word" + beside:
        assert (257 in encoder.encode(text)) == is_cut


def test_the_longest_added_token():
    tokens = [AddedToken("two", 257), AddedToken("two words", 258)]
    assert Encoder(BYTES, [], tokens).encode("two words") == [258]


def test_white_space_that_two_tokens_want():
    tokens = [AddedToken("<r>", 257, rstrip=True), AddedToken("\n<l>", 258, lstrip=True)]
    assert Encoder(BYTES, [], tokens).encode("<r> \n<l>z") == [257, 258, 89]


def test_ranks_are_not_ids():
    vocab = BYTES | {"ab": 258, "bc": 257}
    assert Encoder(vocab, [["a", "b"], ["b", "c"]]).encode("abc") == [258, 66]
    assert Encoder(vocab, [["b", "c"], ["a", "b"]]).encode("abc") == [64, 257]


def test_a_merge_that_is_there_twice():
    merges = [["b", "c"], ["a", "b"], ["b", "c"]]
    assert Encoder(BYTES | {"ab": 257, "bc": 258}, merges).encode("abc") == [257, 66]


def test_an_added_token_that_the_merges_make():
    vocab = BYTES | {"Ġa": 257}
    encoder = Encoder(vocab, [["Ġ", "a"]], [AddedToken("Ġa", 257), AddedToken("Ġ", BYTES["Ġ"])])
    assert encoder.decode([257, BYTES["Ġ"], 64]) == " a a"


def test_a_token_that_is_no_bytes():
    assert Encoder(BYTES | {"€ a": 257}, []).decode([257]) == "€ a"


def test_one_text_with_two_ids():
    with pytest.raises(ValueError, match="'!' has two ids, 0 and 257"):
        Encoder(BYTES, [], [AddedToken("!", 257)])
