"""GPT-2's tokenizer: byte-level byte-pair encoding (BPE), text <-> token ids.

Text becomes UTF-8 bytes, so any text can be encoded. A pattern splits it into words; within each
word, neighbouring tokens are merged pair by pair, in the order in which the pairs were learned.
The second half of this file reads all that from a model's folder.
Sources: Sennrich et al. 2016 (BPE), Radford et al. 2019 (BPE on bytes).
"""
import heapq
import json
import typing
from pathlib import Path

import regex

END_OF_TEXT = "<|endoftext|>"
# contractions; runs of letters, of digits and of other signs, each with one leading space; white
# space, where the last character of a run is left to the word after it
WORD = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
# white space and a word character beside an added token; (?r) searches backwards
SPACE_BEFORE, SPACE_AFTER = regex.compile(r"(?r)\s*"), regex.compile(r"\s*")
WORD_AFTER = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]")
WORD_BEFORE = regex.compile("(?r)" + WORD_AFTER.pattern)


def byte_symbols():
    """Return GPT-2's byte-to-unicode table: {byte: the character that stands for it in files}.

    Printable bytes stand for themselves and come first; the rest follow, from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + n) for n, byte in enumerate(rest)}


BYTE_SYMBOLS = byte_symbols()
SYMBOL_BYTES = {symbol: byte for byte, symbol in BYTE_SYMBOLS.items()}


class AddedToken(typing.NamedTuple):
    """A token that stands for one literal text, whatever the merges would make of it."""

    text: str
    id: int
    lstrip: bool = False                          # takes the white space before it as well
    rstrip: bool = False                          # and the white space after it
    single_word: bool = False                     # only where no word character is beside it
    normalized: bool = False                      # looked for after those that are not


def cut(text, tokens):
    """Cut added tokens, {text: AddedToken}, out of a text: a list of AddedTokens and strings.

    The leftmost comes first, and of those that begin there, the longest.
    """
    parts, end = [], 0
    longest_first = "|".join(map(regex.escape, sorted(tokens, key=len, reverse=True)))
    for match in regex.finditer(longest_first, text) if tokens else []:
        token, (start, stop) = tokens[match[0]], match.span()
        if token.single_word and (WORD_BEFORE.match(text, 0, start)
                                  or WORD_AFTER.match(text, stop)):
            continue
        if token.lstrip:
            start = SPACE_BEFORE.match(text, end, max(start, end)).start()
        if token.rstrip:
            stop = SPACE_AFTER.match(text, stop).end()
        if start >= stop:                         # white space that another token has taken
            continue
        if start > end:
            parts.append(text[end:start])
        parts.append(token)
        end = stop
    return [*parts, text[end:]] if end < len(text) else parts


class Encoder:
    """A tokenizer: a vocabulary, merges, and added tokens, which are cut out of a text first.

    vocab: {symbols: id}, the ids in any order; merges: pairs of symbols, in the order in which
    they were learned; added_tokens: AddedTokens, each text once. add_prefix_space: what is encoded
    begins with a space, if need be with one put there. ValueError if a merge needs a token that
    the vocabulary lacks, or an id stands for two tokens, or a token is there twice.
    """

    def __init__(self, vocab, merges, added_tokens=(), add_prefix_space=False):
        self.add_prefix_space = add_prefix_space
        self.byte_ids = {byte: vocab[symbol] for byte, symbol in BYTE_SYMBOLS.items()
                         if symbol in vocab}
        self.merges = {}                          # pair of ids -> (rank, new id)
        for rank, (left, right) in enumerate(merges):
            for token in left, right, left + right:
                if token not in vocab:
                    raise ValueError(f"the merge {left!r} {right!r} needs a token {token!r}, which "
                                     f"the vocabulary lacks")
            self.merges[vocab[left], vocab[right]] = rank, vocab[left + right]
        made = {*self.byte_ids.values(), *(token_id for _, token_id in self.merges.values())}
        # ids of tokens whose characters are text, not symbols of bytes
        self.literal = {token.id for token in added_tokens} - made

        self.ids = vocab | {token.text: token.id for token in added_tokens}
        texts = sorted(token.text for token in added_tokens)
        for text, next_text in zip(texts, texts[1:]):
            if text == next_text:
                raise ValueError(f"the added token {text!r} is there twice: remove one")
        "".join(self.ids).encode()                # ValueError for a lone surrogate
        self.tokens = {}                          # id -> token
        for token, token_id in self.ids.items():
            if token_id in self.tokens:
                raise ValueError(f"the id {token_id} stands for two tokens, "
                                 f"{self.tokens[token_id]!r} and {token!r}")
            if vocab.get(token, token_id) != token_id:
                raise ValueError(f"{token!r} has two ids, {vocab[token]} and {token_id}")
            self.tokens[token_id] = token
        # Hugging Face's tokenizers look for those that are not "normalized" first, and so do we
        self.rounds = [{token.text: token for token in added_tokens if token.normalized == later}
                       for later in (False, True)]
        # where texts begin and end, unless the model's folder says something else
        self.end_of_text = self.bos_token_id = self.ids.get(END_OF_TEXT)
        self.eos_token_ids = [] if self.end_of_text is None else [self.end_of_text]

    def encode(self, text):
        """Return the token ids of a text. ValueError for a byte that the vocabulary lacks.

        Surrogate escapes, by which Python passes on bytes that are not UTF-8, become those bytes.
        """
        parts = [text]
        for tokens in self.rounds:
            parts = [piece for part in parts
                     for piece in (cut(part, tokens) if isinstance(part, str) else [part])]
        ids = []
        for part in parts:
            if isinstance(part, AddedToken):
                ids.append(part.id)
                continue
            if self.add_prefix_space and not part.startswith(" "):
                part = " " + part
            for word in WORD.findall(part):
                ids += self.merge(self.bytes_to_ids(word))
        return ids

    def bytes_to_ids(self, word):
        raw = word.encode(errors="surrogateescape")
        for byte in raw:
            if byte not in self.byte_ids:
                raise ValueError(f"the tokenizer was trained without the byte 0x{byte:02X}, so it "
                                 f"can't encode {word!r}")
        return [self.byte_ids[byte] for byte in raw]

    def merge(self, ids):
        """Merge neighbouring ids, the earliest-learned pair first and from left to right.

        A heap holds what could be merged, as (merge, left place, right place), where a merge is
        (rank, new id); so a word of n bytes takes n log n steps and not n * n.
        """
        ids = [*ids, None]                        # None merges with nothing: a stop at both ends
        before, after = list(range(-1, len(ids) - 1)), list(range(1, len(ids) + 1))
        heap = []

        def consider(left, right):
            merge = self.merges.get((ids[left], ids[right]))
            if merge is not None:
                heapq.heappush(heap, (merge, left, right))

        for place in range(len(ids) - 1):
            consider(place, place + 1)
        while heap:
            merge, left, right = heapq.heappop(heap)
            if self.merges.get((ids[left], ids[right])) != merge:
                continue                          # one of the two has been merged meanwhile
            ids[left], ids[right] = merge[1], None
            after[left] = after[right]
            before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [token_id for token_id in ids if token_id is not None]

    def decode(self, ids):
        """Return the text of token ids; invalid UTF-8 in it becomes U+FFFD.

        An id without a token is no text: models may have more rows than there are tokens.
        ValueError for a negative id.
        """
        raw = bytearray()
        for token_id in ids:
            if token_id < 0:
                raise ValueError(f"there is no token id {token_id}")
            token = self.tokens.get(int(token_id), "")
            if token_id in self.literal or any(symbol not in SYMBOL_BYTES for symbol in token):
                raw += token.encode()
            else:
                raw += bytes(SYMBOL_BYTES[symbol] for symbol in token)
        return raw.decode(errors="replace")


# The rest of this file reads an Encoder from a model's folder.

# settings of tokenizer.json -> the values with which it gives GPT-2's ids: all others are refused
FITTING = {"normalizer": [None], "pre_tokenizer.type": ["ByteLevel"],
           "pre_tokenizer.use_regex": [None, True], "model.type": [None, "BPE"],
           "model.dropout": [None, 0], "model.ignore_merges": [None, False],
           "model.continuing_subword_prefix": [None, ""],
           "model.end_of_word_suffix": [None, ""], "decoder.type": [None, "ByteLevel"]}
# and of these two, if there are bytes without a token, for then they are in use
FITTING_WITHOUT_ALL_BYTES = {"model.unk_token": [None], "model.byte_fallback": [None, False]}
# Transformers' classes that take all settings from tokenizer.json; GPT-2's has its own, and so have
# others, for other models
GENERIC_CLASSES = "TokenizersBackend", "PreTrainedTokenizerFast"
CONFIG_FITTING = {"tokenizer_class": [*GENERIC_CLASSES, "GPT2TokenizerFast", None, "GPT2Tokenizer"],
                  "split_special_tokens": [None, False], "fast_tokenizer_files": [None]}
# roles of tokens, in the order in which Transformers numbers those that have no id yet
ROLES = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"


def read_text(path):
    """Return a UTF-8 file's text. ValueError, with the path, if it is not one."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def parse_json(name, text):
    """Return the object in a JSON text. ValueError, with its name, if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} does not hold a JSON object")
    return value


def read_json(path):
    """Return the object in a JSON file. ValueError, with the path, if there is none."""
    return parse_json(path, read_text(path))


def load_encoder(folder):
    """Read an Encoder from tokenizer.json or, without one, from vocab.json and merges.txt.

    Added tokens are in tokenizer.json, tokenizer_config.json or added_tokens.json. ValueError, with
    the path, for whatever is wrong, or would make other ids than this tokenizer does.
    """
    folder = Path(folder)
    config = read_tokenizer_config(folder)
    is_generic = config["tokenizer_class"] in GENERIC_CLASSES
    named = named_tokens(config, is_generic)
    if "added_tokens_decoder" in config:
        added_path = folder / "tokenizer_config.json"
        added = read_added_tokens(added_path, config["added_tokens_decoder"])
    else:
        added_path = folder / "added_tokens.json"
        added = read_old_added_tokens(added_path, named)
    if (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer.json"
        vocab, merges, in_file, add_prefix_space = read_tokenizer_json(path)
        if not is_generic and add_prefix_space != bool(config.get("add_prefix_space")):
            raise ValueError(f"{path}: add_prefix_space is {add_prefix_space}, but not in "
                             f"tokenizer_config.json, which Transformers goes by: make them agree")
        if ("added_tokens_decoder" in config and set(added) != set(in_file)) or (
                not {token[:2] for token in added} <= {token[:2] for token in in_file}):
            raise ValueError(f"{path}: its added_tokens are not those of {added_path.name}: make "
                             f"them agree")
        added_path, added = path, in_file
    else:
        path = f"{folder / 'vocab.json'} and merges.txt"
        vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
        merges = read_merges(folder / "merges.txt")
        add_prefix_space = bool(config.get("add_prefix_space"))
    added = add_named_tokens(added_path, vocab, added, named)
    try:
        return Encoder(vocab, merges, added, add_prefix_space)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_tokenizer_config(folder):
    """Return what tokenizer_config.json says. ValueError for what would make other ids.

    Without added_tokens_decoder it is an old one: then special_tokens_map.json, if there, has
    precedence. config.json may name the tokenizer's class.
    """
    def read(name):
        return read_json(folder / name) if (folder / name).is_file() else {}

    config = read("tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read("special_tokens_map.json")
    config["tokenizer_class"] = (config.get("tokenizer_class")
                                 or read("config.json").get("tokenizer_class"))
    for name, values in CONFIG_FITTING.items():
        if config.get(name) not in values:
            raise ValueError(f"{folder}: {name} of its tokenizer is {config[name]!r:.200}; these "
                             f"scripts can use a tokenizer only if it is {values[-1]!r}")
    return config


def named_tokens(config, is_generic):
    """Return the tokens that have a role by name, {text: entry}, in Transformers' order.

    Unless the config says something else, three of GPT-2's roles are <|endoftext|>'s.
    """
    roles = dict.fromkeys(ROLES) | ({} if is_generic else dict.fromkeys(ROLES[:3], END_OF_TEXT))
    roles |= {name: value for name, value in config.items() if name.endswith("_token")}
    values = [*roles.values()]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    for more in config.get("model_specific_special_tokens"), extra:
        values += more if isinstance(more, list) else []
        values += more.values() if isinstance(more, dict) else []
    entries = [value if isinstance(value, dict) else {"content": value} for value in values]
    return {entry["content"]: entry for entry in entries if isinstance(entry.get("content"), str)}


def add_named_tokens(path, vocab, added, named):
    """Return the added tokens and those that are named only, as Transformers numbers them.

    ValueError if its numbers differ from those in the files: it gives a token that is not in the
    vocabulary the next id, whatever the files say. (So it does with <|endoftext|>, for the sake of
    GPT-2's roles. A model trained without it has no use for that: here it stays plain text.)
    """
    next_id, texts = len(vocab), {token.text for token in added}
    for token in added:
        if token.text not in vocab and token.id != next_id:
            raise ValueError(f"{path}: the added token {token.text!r} has the id {token.id}, but "
                             f"Transformers gives it {next_id}, the next one")
        next_id = max(next_id, token.id + 1)
    for text, entry in named.items():
        if text and text not in texts:
            token_id = vocab.get(text, next_id)
            next_id = max(next_id, token_id + 1)
            if text in vocab or text != END_OF_TEXT:
                added = [*added, added_token(path, token_id, {"normalized": False} | entry)]
    return added


def read_tokenizer_json(path):
    """Return (vocab, merges, added tokens, add_prefix_space). ValueError if it is not like GPT-2's.

    The format of Hugging Face's tokenizers, github.com/huggingface/tokenizers.
    """
    file = read_json(path)
    model = file.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
        raise ValueError(f"{path}: its model has no merges, so it is not GPT-2's BPE")
    vocab = check_vocab(path, model.get("vocab"))
    has_all_bytes = vocab.keys() >= SYMBOL_BYTES.keys()
    for name, values in (FITTING | ({} if has_all_bytes else FITTING_WITHOUT_ALL_BYTES)).items():
        section, _, key = name.partition(".")
        value = file.get(section)
        if key and isinstance(value, dict):
            value = value.get(key)
        if value not in values:
            raise ValueError(f"{path}: {name} is {value!r:.200}; these scripts can use a "
                             f"tokenizer only if it is {values[-1]!r}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    for merge in merges:
        if not isinstance(merge, list) or [type(part) for part in merge] != [str, str]:
            raise ValueError(f"{path}: {str(merge):.200} is not a merge of two tokens")
    added = file.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError(f"{path}: its added_tokens are not a list of objects")
    added = [added_token(path, entry.get("id"), entry) for entry in added]
    return vocab, merges, added, bool(file["pre_tokenizer"].get("add_prefix_space", True))


def check_vocab(path, vocab):
    """Return {symbols: id}. ValueError, with the path, if it is something else."""
    if not isinstance(vocab, dict):
        raise ValueError(f"{path}: its vocabulary is not an object, {{token: id}}")
    for token, token_id in vocab.items():
        if not is_id(token_id):
            raise ValueError(f"{path}: the token {token!r} has {token_id!r:.200} for an id")
    return vocab


def read_merges(path):
    """Return the pairs in merges.txt: one a line, a space between the two; first line #version."""
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line and not (number == 1 and line.startswith("#version")):
            merges.append(line.split(" "))
            if len(merges[-1]) != 2:
                raise ValueError(f"{path}, line {number}: {line!r} is not a merge")
    return merges


def read_added_tokens(path, entries):
    """Return the AddedTokens of an added_tokens_decoder, {id as text: entry}, by id."""
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: its added_tokens_decoder is not an object")
    added = [added_token(path, int(token_id) if regex.fullmatch("[0-9]{1,9}", token_id) else None,
                         entry) for token_id, entry in entries.items()]
    return sorted(added, key=lambda token: token.id)


def read_old_added_tokens(path, named):
    """Return the AddedTokens of added_tokens.json, {text: id}, by id."""
    ids = read_json(path) if path.is_file() else {}
    added = [added_token(path, token_id, {"content": text, "normalized": text not in named})
             for text, token_id in ids.items()]
    return sorted(added, key=lambda token: token.id)


def added_token(path, token_id, entry):
    """Return the AddedToken that JSON describes. ValueError, with the path, if it doesn't."""
    fields = entry if isinstance(entry, dict) else {}
    text = fields.get("content")
    flags = [fields.get(name, False) for name in ("lstrip", "rstrip", "single_word")]
    flags.append(fields.get("normalized", not fields.get("special", False)))
    if not (is_id(token_id) and isinstance(text, str) and text
            and all(type(flag) is bool for flag in flags)):
        raise ValueError(f"{path}: {str(entry):.200} is not an added token with an id")
    return AddedToken(text, token_id, *flags)


def is_id(value):
    return type(value) is int and value >= 0
