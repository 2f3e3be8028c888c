"""Write index.html: the three steps from version 1 to version 4, function by function, explained.

    python docs/diffs.py

The code on the page is read from the scripts, so run this again when one of them has changed. The
notes are below. Beside this file: sidebyside.py, which compares and colours code; drawings.py, the
drawings; page.html, the page around the diffs, with its style.
"""
import math
import re
import string
from html import escape
from pathlib import Path

import drawings
from sidebyside import TOP, changed, one_side, parts, two_sides, whole

HERE = Path(__file__).resolve().parent
STEPS = [("v1", "v2"), ("v2", "v3"), ("v3", "v4")]

# What a reader should know of each changed function, by step and function. `code` stands in the
# scripts like that, ``code`` does not. "Otherwise:" and "Shapes:", where there is something to say,
# begin paragraphs of their own; shapes are "what: before => after", or "what: after" in a function
# that is new.
NOTES = {
    ("v2", "linear"): """
        `x` has an axis more, and the weights are the same for every position of every row. So all
        positions of all rows are laid out as one tall matrix, multiplied once, and cut into rows
        again. Two rows of five positions of GPT-2 124M, [2, 5, 768], become [10, 768], and one
        product with `w` [768, 2304] makes all ten queries, keys and values.

        Otherwise: ``x @ w`` would give the same numbers for three axes as well. But NumPy would
        make one small product for each row and read all of `w` for each. Sharing that reading is
        what the batch is for.

        Shapes: x: [T, in] => [B, T, in]; in the product: [T, in] => [B * T, in];
        result: [T, out] => [B, T, out]""",
    ("v2", "ffn"): """
        Only the comments change. The feed-forward network treats each position by itself, so it
        doesn't matter whether two positions belong to the same prompt. `linear` takes care of the
        new axis, and `gelu` works on single numbers. Padding is computed like everything else: here
        2 positions of 10. Positions meet in attention and nowhere else, so a mask in attention is
        enough to keep the padding out.

        Shapes: x: [T, E] => [B, T, E]; in between: [T, 4E] => [B, T, 4E]""",
    ("v2", "attention"): """
        Only the comments change. `@` multiplies the last two axes and does so for each index of the
        axes before them: it was for each head, now it is for each row and each head. The mask [B,
        1, T, T] broadcasts: its 1 stretches over the heads, so every row has its own mask, and all
        heads of the row share it.

        Otherwise: ``k.T`` for `k.swapaxes(-1, -2)` would turn all four axes round, to [D, T, H, B].
        With a mask [T, T] every row would be treated alike, although only some have padding.

        Shapes: q, k, v: [H, T, D] => [B, H, T, D]; scores: [H, T, T] => [B, H, T, T];
        mask: [T, T] => [B, 1, T, T]""",
    ("v2", "mha"): """
        The rows must never meet, so B comes first and stays first. `c_attn` makes 3E numbers for
        each position: a query, a key and a value, each of H heads with D numbers. `reshape` moves
        no number, it only gives these axes names: [B, T, 3, H, D]. `transpose` then brings the 3 to
        the front, to unpack q, k and v, and H before T, so that `attention` has a [T, D] matrix for
        each row and head. For our batch: [2, 5, 2304], then [2, 5, 3, 12, 64], then three times [2,
        12, 5, 64].

        On the way back, the heads of a position must stand side by side again before `reshape`
        joins them: `x.transpose(0, 2, 1, 3)`.

        Otherwise: No error tells you. With ``reshape(B, T, n_head, 3, E // n_head)``, and
        `transpose` changed to match, all sizes are right, and head 0 takes the query of head 1 for
        its key. Without the last `transpose`, numbers of different positions are joined. Both give
        nonsense: [bug 4](#bug-4).

        Shapes: qkv: [T, 3, H, D] => [B, T, 3, H, D]; q, k, v: [H, T, D] => [B, H, T, D];
        result: [T, E] => [B, T, E]""",
    ("v2", "gpt2"): """
        This is the step: a mask and positions that make padding invisible.

        *The mask.* `causal` is the square of version 1: each query sees itself and the keys before
        it. `padding` has a number for each key of each row, 0 for a real token, −1e10 for padding.
        `padding[:, None, None, :]` stretches it over heads and queries, and `np.minimum` lets
        either of them block a key. In row 1, the query *old* in column 3 may see columns 2 and 3:
        not 0 and 1, which are padding, and not 4, which is its future. In row 0, the query in
        column 3 sees columns 0 to 3.

        *The positions.* Version 1 counts columns, `wpe[:T]`. Here *The* stands in column 2, but it
        is the first token of its text, and the model must see it at position 0. So count real
        tokens: `cumsum` makes [0, 0, 1, 2, 3] of the mask [0, 0, 1, 1, 1]; minus 1 and clipped it
        is [0, 0, 0, 1, 2]. The padding gets position 0; any would do, as nobody reads what comes of
        it.

        Otherwise: With `wpe[:T]`, *The* would be at position 2 beside a longer prompt and at 0
        alone: a prompt would go on differently depending on its neighbours. Without `padding`, real
        tokens would average in what stands in the padding. With ``-np.inf`` for −1e10, the mask
        would be 0 · −inf = NaN wherever a key is allowed. Made without that product, it would leave
        the first query of row 1 nothing but −inf. Softmax makes −inf − (−inf) = NaN of that, and in
        the next layer, its key makes every score of the row NaN. With −1e10 its scores round to
        that very number; the weights are equal, and nobody reads the result.

        Shapes: input_ids: [T] => [B, T]; mask: [T, T] => [B, 1, T, T];
        positions: 0 … T − 1 => [B, T]; logits: [T, V] => [B, T, V]""",
    ("v2", "pad_batch"): """
        The rectangle: our prompts of 5 and 3 tokens become two arrays of [2, 5]. `attention_mask`
        says what is real. The padding's id is 0, which is also a token of the vocabulary; that does
        no harm, as only the mask decides.

        *Why on the left?* The next token is predicted at the newest one. On the left, the newest
        tokens of all rows stand in the last column: one slice reads all logits, and one more column
        holds all new tokens.

        Otherwise: Padded on the right, the newest token of row 1 would be in column 2 and that of
        row 0 in column 4. Each row would need an index of its own, and its new tokens would follow
        a gap of padding in the middle of the row.

        Shapes: input_ids: [B, T] int64; attention_mask: [B, T] float32""",
    ("v2", "generate"): """
        The same loop, a column at a time. `argmax` gives one id for each row, [B, 1], and it is
        appended to all rows at once. The mask grows with them, by a column of ones: new tokens are
        real, in the short row too. A batch stays a rectangle to the end, so every row gets the same
        number of new tokens.

        The check that is new refuses a row without a real token. All its keys would be blocked, all
        weights equal, and what came out would be the average of padding.

        Otherwise: If the mask doesn't grow, its 5 columns meet a square of 6 by 6 in the second
        pass, and NumPy refuses: the friendly kind of bug.

        Shapes: input_ids: [T] => [B, T]; logits read: [1, V] => [B, 1, V];
        next token: [] => [B, 1]; result: [n] => [B, n]""",
    ("v2", "main"): """
        The command line takes any number of prompts now, and `pad_batch` makes the rectangle. One
        prompt is a batch of one row, so no special case is needed.""",
    ("v3", "attention"): """
        Only the comments change, and they say what is new: there can be more keys than queries, S
        of them for T. In prefill both are 5 and the scores are a square. In the first decode step
        one query meets six keys, a single row. A matrix product doesn't ask its two matrices to be
        equally tall, so no line of code changes.

        For the seventh token, version 2 computes 7 · 7 = 49 scores in each head, and version 3
        computes 7. The other 42 are repeats (36, as in version 2's pass before) or blocked by the
        mask anyway (6).

        Shapes: q: [B, H, T, D] => [B, H, T, D], T new ones; k, v: [B, H, T, D] => [B, H, S, D];
        scores: [B, H, T, T] => [B, H, T, S]""",
    ("v3", "mha"): """
        The heart of it. In decode, `x` holds one position per row, and q, k and v are computed for
        that one. The keys and values of all positions before it are put in front, along axis 2,
        which is time in [B, H, T, D]. The result is kept for the next step, and attention reads it
        all.

        *Why keep K and V, but not Q?* A query says what its own position looks for. It is used
        once, in the pass that computes it; what it found went into `x`, and no later position reads
        it. A key and a value say what a position offers to others, and every later position asks.
        The same goes for `x` and the results of `ffn`: no later position reads them.

        *Why may they be kept?* Attention is causal. What a layer computes for a position depends on
        that position and those before it. A token appended at the end changes none of it, in any
        layer. (In a model that looks both ways, such as BERT, every key would change.)

        Otherwise: With the new key and value in front, all shapes are right. Without padding
        even the tokens are: attention is a weighted sum, and doesn't care about the order. In a
        padded batch, the columns of the mask then hide the wrong keys. Without `layer_cache["k"],
        layer_cache["v"] = k, v` nothing is kept, and the first decode step fails: six weights for
        one value.

        Shapes: x, in decode: [B, T, E] => [B, 1, E]; q: [B, H, T, D] => [B, H, 1, D];
        k, v for attention: [B, H, T, D] => [B, H, S, D]""",
    ("v3", "transformer_block"): """
        It only hands the cache down. Of its parts, attention alone looks at other positions;
        `layer_norm`, which brings a position's numbers to one scale, and `ffn` need the new
        position and nothing else. Each layer has its own cache, for each has its own keys and
        values.

        Otherwise: If it were forgotten here, prefill would work, and the first decode step would
        fail: the mask has six columns, and there is one value.

        Shapes: x: [B, T, E] => [B, T, E], T new ones""",
    ("v3", "gpt2"): """
        `gpt2` sees new tokens only and can't know where they stand. In the first decode step,
        `input_ids` is *lived* and *said*, [2, 1]. A `cumsum` over that one column says position 0
        for both; the truth is 5 and 3. So positions and mask are handed in. The lines that made
        them move, unchanged, to `generate`, which knows what came before.

        The gain: `gpt2` knows nothing of prefill and decode. It takes a whole prompt, a piece of it
        or a single token, as long as each mask follows the rule: a query at position p sees the
        real keys at positions up to p. For two new tokens after three that is a rectangle of 2 by
        5: four keys for the first, five for the second.

        Otherwise: Positions made in here would be 0 in every decode step, or, counted from the
        cache's length, 5 for both rows: right for row 0, wrong for row 1, which has two columns of
        padding. And without `strict=True`, a list of caches that is too short would silently skip
        the last layers.

        Shapes: input_ids: [B, T], all so far => [B, T], new ones; pos_ids: made here => [B, T];
        mask: made here, [B, 1, T, T] => handed in, [B, 1, T, S]""",
    ("v3", "generate"): """
        *Prefill* is the first pass of version 2, to the letter. It fills the caches, and its last
        column already predicts the first new token. So n tokens take n − 1 decode steps, and the
        last one is never fed back. *Decode* feeds one token per row, `next_ids`.

        *Why has decode no causal mask?* A causal mask hides the future. In decode there is one
        query, the newest. Every key is its own or older, so there is no future to hide.

        *Why does the padding mask stay?* The padding went through prefill, so its keys and values
        are in the cache. In decode 1 the mask of row 1 is [−1e10, −1e10, 0, 0, 0, 0].

        *Why isn't the position the length of the cache?* The cache is a rectangle: it holds 5
        columns for both rows. For row 0 that is the next position. Row 1 has had three tokens, so
        *said* is at position 3. Each row's last position + 1 is right for both.

        Otherwise: A triangle made for one query and six keys, ``np.tri(1, 6)``, is [1, 0, 0, 0, 0,
        0]: it hides all but the oldest. If *said* is fed in at position 0 or 5, *said* itself is
        still right, since prefill chose it; the token after it is not ([bug 1](#bug-1)). Caches
        made outside of this function would still hold the last call's text ([bug 3](#bug-3)).

        Shapes: fed in: [B, T], longer each time => prefill [B, T], decode [B, 1];
        mask: [B, 1, T, T] => prefill [B, 1, T, T], decode [B, 1, 1, S];
        pos_ids: [B, T] => prefill [B, T], decode [B, 1]""",
    ("v4", "kv_cache_bytes"): """
        The formula of [what a cache costs](#cost), as a function. The tests hold it against what
        `KVCache` allocates. For one token of GPT-2 124M, 2 · 12 · 1 · 1 · 12 · 64 · 4 = 73,728
        bytes. `n_head` counts the heads that have keys and values of their own: in newer models,
        several query heads share each.""",
    ("v4", "KVCache"): """
        Two buffers with room for the whole generation, and for each layer the number of slots that
        are filled. *Capacity* is what there is room for, *length* is what is valid.

        `update` writes at the end of what is valid and returns *views*: `keys[:, :, :end]` copies
        nothing, it is the same memory, seen up to `end`. Everything is checked before anything is
        written, so a refused call leaves no trace.

        *Why a length for each layer?* In a pass, layer 0 appends first, layer 1 next. If the pass
        is interrupted between them, they disagree. `length` then refuses to answer, as no mask
        would fit them all.

        `truncate` forgets without copying: it only lowers the lengths. None of the four scripts
        calls it or `reset`. They are for speculative decoding, which takes back wrong guesses; for
        repairing a cache after an interrupted pass; and for using the buffers again.

        Otherwise: Returning all of the buffer fails at once here: eight keys, a mask for five. With
        a mask made for the whole buffer too, nothing fails, and the free slots are read: [bug
        2](#bug-2). `np.empty` leaves whatever was in memory. Zeros are wrong too: a zero key has
        score 0, and softmax makes exp(0) = 1 of it, not 0. Every free slot would take its share of
        the attention.

        Shapes: keys, values: [n_layer, B, H, capacity, D]; k, v for update: [B, H, T, D];
        returned: [B, H, S, D], S = end""",
    ("v4", "mha"): """
        Five lines become two, because storing is now the cache's business. `mha` hands over the new
        keys and values and gets back all that attention may read. `gpt2` asks a cache for one
        thing, `update`; `generate` also asks for its `length`, to cut the mask. A cache that drops
        old positions, keeps 8 bits of each number, or cuts memory into pages can take this one's
        place, and the model doesn't notice.

        Otherwise: With `np.concatenate` in here, each step makes a new array and copies the past
        into it: the work that a cache saves comes back as traffic. Not much at 100 positions; it
        grows with each one.

        Shapes: k, v for attention: [B, H, S, D], a copy => [B, H, S, D], a view""",
    ("v4", "transformer_block"): """
        One `KVCache` holds all layers, so the block hands down the cache and the number of its
        layer. In version 3 each block got its own dictionary.""",
    ("v4", "gpt2"): """
        `enumerate` gives each block the number under which the cache keeps its keys and values. The
        rest of `gpt2` is that of version 3. With None for the cache it still runs without one.

        Otherwise: With the same number for all, layer 1 would append its keys to those of layer 0:
        ten keys after a prompt of five. An error, luckily: more than the capacity, or more than the
        mask has columns.""",
    ("v4", "generate"): """
        *The length is known.* T tokens of prompt and n new ones fill T + n − 1 slots, since the
        last new one is never fed back: 5 + 4 − 1 = 8. So the cache is allocated before the first
        pass, and the padding's mask is built once, for all columns; each step takes a slice of it,
        up to the slot that is about to be written, `kv_caches.length + 1`.

        *A prompt in pieces.* A long prompt goes through 256 columns at a time: the scores of a
        piece are then at most 256 × S instead of T × T. 600 tokens: pieces of 256, 256 and 88. A
        piece needs only its own lines of the square mask, `mask[:, :, new, :new.stop]`: queries of
        the piece, keys up to its end. `gpt2` takes it as it took the whole.

        *A cache from outside.* `kv_caches` lets another file bring its own. Without it, each call
        makes a new one.

        Otherwise: A capacity of T + n − 2 fails in the last step, with an error that says so. A
        slice of `kv_caches.length` columns lacks the new key: six scores, five numbers of mask. And
        a `KVCache` made once, outside, still holds the text of the call before.

        Shapes: cache: [B, H, S, D] per layer, new each step => [n_layer, B, H, capacity, D], once;
        padding: [B, S], new each step => [B, capacity], once""",
}


def unbroken(text):
    """Shapes such as [B, T, E] stay on one line."""
    return re.sub(r"\[[^][<>]{1,24}\]", lambda match: match[0].replace(" ", "\xa0"), text)


def inline_code(match):
    text = match[1] or match[2]
    return f"<code{' class=w' * (len(text) < 25)}>{text}</code>"


def prose(text):
    """A paragraph of a note as HTML: `code`, ``code``, *emphasis* and [links](#there)."""
    text = re.sub(r"(?<=\w)'(?=\w)", "’", escape(" ".join(text.split()), quote=False))
    for pattern, html in [(r"``(.+?)``|`(.+?)`", inline_code),
                          (r"^\*(.+?)\*", r"<strong>\1</strong>"),
                          (r"(?<![\w*])\*(\w[^*]*)\*", r"<em>\1</em>"),
                          (r"\[([^]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>')]:
        text = re.sub(pattern, html, text)
    return f"<p>{unbroken(text)}</p>\n"


def shapes(text, before, after, is_new):
    """The table of shapes, from "what: before => after; ..."."""
    rows = ""
    for item in " ".join(text.split()).split("; "):
        name, value = item.split(": ", 1)
        cells = "".join(f"<td>{unbroken(escape(cell.strip()))}</td>" for cell in value.split("=>"))
        rows += f"<tr><th scope=row>{escape(name)}</th>{cells}</tr>\n"
    columns = [f"version {version[1]}" for version in ([after] if is_new else [before, after])]
    heads = "".join(f"<th scope=col>{column}</th>" for column in ["shape of", *columns])
    return f'<table class="shapes"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>\n'


def note(before, after, name):
    """Why; and what would go wrong otherwise and the shapes, where the note has them."""
    html = ""
    for paragraph in NOTES[after, name].split("\n\n"):
        paragraph = paragraph.strip()
        if paragraph.startswith("Otherwise: "):
            html += (f'<div class="else"><p class="over">Otherwise</p>'
                     f'{prose(paragraph.removeprefix("Otherwise: "))}</div>\n')
        elif paragraph.startswith("Shapes: "):
            html += shapes(paragraph.removeprefix("Shapes: "), before, after,
                           name not in parts(before))
        else:
            html += prose(paragraph)
    return html


def function(before, after, name):
    """A changed or new function: its note, and then both versions, or the one there is."""
    kind = "changed" if name in parts(before) else "new"
    code = (two_sides(before, after, name) if kind == "changed" else
            one_side(after, name, "a", "+"))
    return (f'<section class="{kind}"><h3 id="{after}-{name}"><code>{name}</code> '
            f'<small>{kind}</small></h3>\n{note(before, after, name)}{code}</section>')


def folded(before, after, name):
    """One line that opens: an unchanged function, or the docstring, which the text repeats."""
    start, end = parts(after)[name]
    if name == TOP:
        return (f'<details class="wide"><summary>{name} <small>docstring changed, imports the same'
                f'</small></summary>{two_sides(before, after, name)}</details>')
    return (f'<details><summary><code>{name}</code> <small>unchanged, lines {start} to {end - 1}'
            f'</small></summary>{one_side(after, name)}</details>')


def step(before, after):
    """All parts of the later file, in its order."""
    names = changed(before, after)
    links = ", ".join(f'<a href="#{after}-{name}"><code>{name}</code></a>' for name in names
                      if name != TOP)
    body = "".join((function if name in names and name != TOP else folded)(before, after, name)
                   for name in parts(after))
    return f'<p class="jump">Changed or new: {links}.</p>\n{body}'


MODELS = {"GPT-2 124M": (12, 12, 64, 4), "GPT-2 355M": (24, 16, 64, 4),
          "GPT-2 774M": (36, 20, 64, 4), "GPT-2 1558M": (48, 25, 64, 4),
          "Qwen3-0.6B": (28, 8, 128, 2), "Llama 3 8B": (32, 8, 128, 2)}


def cost_rows():
    """KiB of cache a token: twice the product of layers, KV heads, head_dim and bytes per value."""
    rows = {name: (2 * math.prod(sizes) // 1024, *sizes) for name, sizes in MODELS.items()}
    return "\n".join(f"<tr><th scope=row>{name}</th>{''.join(f'<td>{n}</td>' for n in row)}</tr>"
                     for name, row in rows.items())


def page():
    """index.html as text."""
    holes = {f"step_{after}": step(before, after) for before, after in STEPS}
    holes |= {f"draw_{draw.__name__}": draw() for draw in (
        drawings.padding, drawings.masks, drawings.decode_masks, drawings.cache, drawings.growth,
        drawings.steps)}
    holes["cost_rows"] = cost_rows()
    holes["loop"] = one_side("v1", "generate")
    holes["version_1"] = whole("v1")
    template = (HERE / "page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(holes)


if __name__ == "__main__":
    (HERE / "index.html").write_text(page(), encoding="utf-8", newline="\n")
