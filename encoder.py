"""GPT-2's tokenizer: byte-level byte-pair encoding (BPE), text <-> token ids.

Text becomes UTF-8 bytes, so any text can be encoded. A pattern splits it into words; within each
word, neighbouring tokens are merged pair by pair, in the order in which the pairs were learned.
Sources: Sennrich et al. 2016 (BPE), Radford et al. 2019 (BPE on bytes).
"""
import heapq
import json
from pathlib import Path

import regex

END_OF_TEXT = "<|endoftext|>"
# contractions; runs of letters, of digits and of other signs, each with one leading space; white
# space, where the last character of a run is left to the word after it
WORD = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_symbols():
    """Return GPT-2's byte-to-unicode table: {byte: the character that stands for it in files}.

    Printable bytes stand for themselves and come first; the rest follow, from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + n) for n, byte in enumerate(rest)}


class Encoder:
    """A vocabulary: the 256 bytes, one token for each merge, and <|endoftext|>, in this order.

    merges: pairs of symbol strings, in the order in which they were learned. ValueError if a
    merge joins an unknown token, or makes one that exists already.
    """

    def __init__(self, merges):
        symbols = byte_symbols()
        self.byte_ids = {byte: n for n, byte in enumerate(symbols)}
        self.ids = {symbol: n for n, symbol in enumerate(symbols.values())}  # symbol -> id
        self.tokens = [bytes([byte]) for byte in symbols]                    # id -> its bytes
        self.merged = {}                                                     # pair of ids -> id
        for left, right in merges:
            if left not in self.ids or right not in self.ids or left + right in self.ids:
                raise ValueError(f"the merge {left!r} {right!r} joins an unknown token, or makes "
                                 f"one that exists already")
            pair = self.ids[left], self.ids[right]
            self.merged[pair] = self.ids[left + right] = len(self.tokens)
            self.tokens.append(self.tokens[pair[0]] + self.tokens[pair[1]])
        self.end_of_text = self.ids[END_OF_TEXT] = len(self.tokens)
        self.tokens.append(END_OF_TEXT.encode())

    def encode(self, text):
        """Return the token ids of a text; <|endoftext|> in it is that one token.

        Surrogate escapes, by which Python passes on bytes that are not UTF-8, become those bytes.
        """
        ids = []
        for n, part in enumerate(text.split(END_OF_TEXT)):
            if n:
                ids.append(self.end_of_text)
            for word in WORD.findall(part):
                raw = word.encode(errors="surrogateescape")
                ids += self.merge([self.byte_ids[byte] for byte in raw])
        return ids

    def merge(self, ids):
        """Merge neighbouring ids, the earliest-learned pair first and from left to right.

        A merge's id is its rank as well. A heap holds what could be merged, as (id, left place,
        right place), so that a word of n bytes takes n log n steps and not n * n.
        """
        ids = [*ids, None]                        # None merges with nothing: a stop at both ends
        before, after = list(range(-1, len(ids) - 1)), list(range(1, len(ids) + 1))
        heap = []

        def consider(left, right):
            new_id = self.merged.get((ids[left], ids[right]))
            if new_id is not None:
                heapq.heappush(heap, (new_id, left, right))

        for place in range(len(ids) - 1):
            consider(place, place + 1)
        while heap:
            new_id, left, right = heapq.heappop(heap)
            if self.merged.get((ids[left], ids[right])) != new_id:
                continue                          # one of the two has been merged meanwhile
            ids[left], ids[right] = new_id, None
            after[left] = after[right]
            before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [token_id for token_id in ids if token_id is not None]

    def decode(self, ids):
        """Return the text of token ids; invalid UTF-8 in it becomes U+FFFD.

        ValueError if the vocabulary doesn't have one of the ids.
        """
        tokens = []
        for token_id in ids:
            if not 0 <= token_id < len(self.tokens):
                raise ValueError(f"unknown token id {token_id}: the vocabulary ends at "
                                 f"{len(self.tokens) - 1}")
            tokens.append(self.tokens[token_id])
        return b"".join(tokens).decode(errors="replace")


def read_text(path):
    """Return a UTF-8 file's text. ValueError, with the path, if it is not one."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def read_json(path):
    """Return the object in a JSON file. ValueError, with the path, if there is none."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def load_encoder(folder):
    """Read an Encoder from vocab.json and merges.txt.

    merges.txt has one merge a line, two symbols and a space between them, after a line that
    says #version; vocab.json is {symbol: id}. The ids follow from the merges, so vocab.json adds
    nothing, but has to agree. ValueError, with the path, for whatever is wrong.
    """
    merges_path, vocab_path = Path(folder) / "merges.txt", Path(folder) / "vocab.json"
    merges = []
    for number, line in enumerate(read_text(merges_path).split("\n"), start=1):
        if line and not (number == 1 and line.startswith("#version")):
            merges.append(line.split(" "))
            if len(merges[-1]) != 2:
                raise ValueError(f"{merges_path}, line {number}: {line!r} is not a merge")
    try:
        encoder = Encoder(merges)
    except ValueError as error:
        raise ValueError(f"{merges_path}: {error}") from None
    vocab = read_json(vocab_path)
    for symbol in {**encoder.ids, **vocab}:
        if symbol not in encoder.ids or vocab.get(symbol) != encoder.ids[symbol]:
            raise ValueError(
                f"{vocab_path} does not match {merges_path}: {symbol!r} has the id "
                f"{vocab.get(symbol)!r}, and by the merges {encoder.ids.get(symbol)}")
    return encoder
