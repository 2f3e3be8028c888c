"""The drawings of index.html as inline SVG; diffs.py puts them in.

All show one small batch, a prompt of five tokens and one of three, on a grid of cells. Colours come
from page.html, so they follow its light or dark scheme. No meaning is in colour alone: cells are
also dashed, crossed out, or have a word in them.
"""
import math
import re
from html import escape
from pathlib import Path

ROWS = ["Once upon a time there".split(), "The old fox".split()]
NEXT = ["lived a king".split(), "said to her".split()]       # the new tokens of each row
COLUMNS = max(map(len, ROWS))
CELL, LINE, LEFT = 46, 30, 62                                # width, height, room for labels


def positions(row, columns):
    """Each column's position; padding has none that matters."""
    first = COLUMNS - len(ROWS[row])
    return ["–"] * first + list(range(columns - first))


def look(row, query, key):
    """How a mask treats a key: by its column, and by the query's."""
    if key < COLUMNS - len(ROWS[row]):
        return "pad"
    return "on" if key <= query else "off"


def words(row, columns):
    """The row's first columns, with the padding before its prompt."""
    return ([""] * (COLUMNS - len(ROWS[row])) + ROWS[row] + NEXT[row])[:columns]


def cell(column, line, kind, text="", width=CELL):
    x, y, w, h = LEFT + column * width, line * LINE, width - 3, LINE - 3
    cross = f'<path class="cross" d="M{x} {y + h}L{x + w} {y}"/>' if kind == "pad" else ""
    return (f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="3"/>{cross}'
            + (label(column, line, text, f"in-{kind}", width) if text else ""))


def label(column, line, text, kind="plain", width=CELL):
    """Text in the middle of a cell; column -1: at the left edge, before the cells."""
    x, anchor = (0, "start") if column < 0 else (LEFT + column * width + (width - 3) / 2, "middle")
    return (f'<text class="{kind}" x="{x:g}" y="{line * LINE + 18}" text-anchor="{anchor}">'
            f'{escape(text)}</text>')


def panel(name, heading, text, marks, lines, columns, width=CELL):
    """One SVG under its heading; text says the same in words, for those who can't see it."""
    w, title = LEFT + columns * width, re.sub("<.*?>", "", heading)
    return (f'<div class="panel"><p class="over">{heading}</p>'
            f'<svg role="img" viewBox="0 0 {w} {lines * LINE}" width="{w}" '
            f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{title}</title>'
            f'<desc id="{name}-desc">{escape(text)}</desc>{"".join(marks)}</svg></div>')


def figure(panels, legend, caption):
    keys = "".join(f'<li><svg viewBox="61 -1 46 30" width="34" height="22" aria-hidden="true">'
                   f'{cell(0, 0, kind, text)}</svg> {words}</li>' for kind, text, words in legend)
    legend = keys and f'<ul class="legend">{keys}</ul>'
    return (f'<figure><div class="panels">{"".join(panels)}</div>{legend}'
            f'<figcaption>{caption}</figcaption></figure>')


def padding():
    """Version 2: rows of unequal length, padded on the right and on the left."""
    right, left = [label(-1, 0, "column")], [label(-1, 0, "column")]
    for column in range(COLUMNS + 1):
        left.append(label(column, 0, str(column)))
    for column in range(COLUMNS):
        right.append(label(column, 0, str(column)))
    for row, prompt in enumerate(ROWS):
        right.append(label(-1, 1 + 2 * row, f"row {row}"))
        left += [label(-1, 1 + 2 * row, f"row {row}"), label(-1, 2 + 2 * row, "position")]
        for column in range(COLUMNS):
            word = prompt[column] if column < len(prompt) else ""
            kind = "on" if column == len(prompt) - 1 else "old" if word else "pad"
            right.append(cell(column, 1 + 2 * row, kind, word))
        for column, word in enumerate(words(row, COLUMNS + 1)):
            kind = {COLUMNS - 1: "on", COLUMNS: "new"}.get(column, "old" if word else "pad")
            left += [cell(column, 1 + 2 * row, kind, word),
                     label(column, 2 + 2 * row, str(positions(row, COLUMNS + 1)[column]))]
    return figure(
        [panel("pad-right", "Padded on the right: not like this",
               "Row 0: Once upon a time there, in columns 0 to 4. Row 1: The old fox, in columns 0 "
               "to 2, then two columns of padding. The newest tokens are in columns 4 and 2.",
               right, 4, COLUMNS),
         panel("pad-left", "Padded on the left, and the first new token of each row",
               "Row 0: Once upon a time there, at positions 0 to 4, then lived at position 5. Row "
               "1: two columns of padding, then The old fox at positions 0, 1 and 2, then said at "
               "position 3. Both newest tokens are in column 4, both new tokens in column 5.",
               left, 5, COLUMNS + 1)],
        [("old", "a", "prompt"), ("on", "a", "its newest token"), ("new", "a", "new token"),
         ("pad", "", "padding")],
        "On the right, the newest tokens stand in columns 4 and 2, and new ones would follow a gap."
        " On the left, one column holds them all. Columns count slots, positions count tokens: in "
        "column 5, <b>lived</b> is at position 5 and <b>said</b> at position 3.")


def mask_lines(row, queries, keys, first):
    """A row of the mask for each query, the line of the drawing it starts on: first."""
    marks = []
    for line, query in enumerate(queries):
        marks.append(label(-1, first + line, words(row, keys)[query] or "padding"))
        for key in range(keys):
            kind = look(row, query, key)
            marks.append(cell(key, first + line, kind, "0" if kind == "on" else ""))
    return marks


def keys_above(row, keys):
    return [label(-1, 0, "query")] + [label(key, 0, word or "pad")
                                      for key, word in enumerate(words(row, keys))]


MASK_LEGEND = [("on", "0", "may be attended to: 0 is added to the score"),
               ("off", "", "in the future: −1e10"), ("pad", "", "padding: −1e10")]


def masks():
    """The mask of prefill, and of each whole pass of version 2: a square for each row."""
    texts = ["A square of five queries by five keys. Each query may attend to itself and to the "
             "keys before it: one for the first, five for the last.",
             "A square of five queries by five keys. The first two columns are padding, which no "
             "query attends to. The attends to itself, old to The and old, fox to all three."]
    return figure(
        [panel(f"mask-{row}", f"Row {row}: <code>mask[{row}, 0]</code>", texts[row],
               keys_above(row, COLUMNS) + mask_lines(row, range(COLUMNS), COLUMNS, 1),
               COLUMNS + 1, COLUMNS) for row in range(len(ROWS))],
        MASK_LEGEND,
        "The mask of the first pass, <code class=w>[2, 1, 5, 5]</code>: for each row a square, "
        "queries down, keys across. The filled cells of row 1 are the small triangle that its "
        "prompt would have alone. The two queries of the padding have nothing to look at; "
        "their results are never read.")


def decode_masks():
    """Version 3: a row of mask for each decode step, longer by a column each."""
    panels = []
    for row in range(len(ROWS)):
        marks = keys_above(row, COLUMNS + 2)
        for step in (1, 2):
            marks += mask_lines(row, [COLUMNS + step - 1], COLUMNS + step, step)
        panels.append(panel(
            f"decode-{row}", f"Row {row}: <code>mask[{row}, 0]</code> in decode 1 and decode 2",
            f"Query {NEXT[row][0]} attends to {len(ROWS[row]) + 1} keys, query {NEXT[row][1]} to "
            f"{len(ROWS[row]) + 2}: to all but the padding.", marks, 3, COLUMNS + 2))
    return figure(panels, MASK_LEGEND[::2],
                  "The masks of decode, <code class=w>[2, 1, 1, 6]</code> and <code class=w>"
                  "[2, 1, 1, 7]</code>: one query, so one line. There is no key after the "
                  "query, so no cell is dashed. The "
                  "padding of row 1 is in the cache and stays crossed out.")


def cache():
    """Version 3: prefill and decode fill the cache of one layer."""
    panels = []
    for step, name in enumerate(["Prefill", "Decode 1", "Decode 2"]):
        total = COLUMNS + step
        new = range(total if step == 0 else 1)
        fed = range(total - len(new), total)
        marks = [label(-1, 0, "token")] + [label(c, 0, w) for c, w in enumerate(words(0, total))]
        for line, letter in enumerate("qkv", 1):
            marks.append(label(-1, line, {"q": "query", "k": "key", "v": "value"}[letter]))
            for column in range(total):
                kind = "on" if column in fed else "off" if letter == "q" else "old"
                marks.append(cell(column, line, kind, "" if kind == "off" else f"{letter}{column}"))
        past = total - len(new)
        read = f"{past} keys, {past} values" if past else "nothing"
        text = (f"Computed: queries, keys and values of {len(new)} position{'s'[:len(new) > 1]}. "
                f"Read from the cache: {read}. Predicts: {NEXT[0][step]}.")
        panels.append(panel(f"cache-{step}", name, text, marks, 4, COLUMNS + 2)
                      .replace("</svg>", f"</svg><p>{text}</p>"))
    return figure(
        panels, [("on", "k5", "computed now; k and v are also stored"),
                 ("old", "k0", "read from the cache"), ("off", "", "not kept, and not missed")],
        "One layer, row 0 of the batch. Without a cache the three passes compute 5 + 6 + 7 = 18 "
        "positions; with it, 5 + 1 + 1 = 7. The last token, <b>king</b>, is never fed back.")


def growth():
    """Version 4: what concatenate copies, and the one slot that is written."""
    steps, capacity, width = 3, COLUMNS + 3, 35
    grown, sliced = [], []
    for step in range(steps + 1):
        filled = COLUMNS + step
        for marks in grown, sliced:
            marks.append(label(-1, step, f"decode {step}" if step else "prefill"))
        for column in range(capacity):
            new = column == filled - 1 or (step == 0 and column < filled)
            if column < filled:
                grown.append(cell(column, step, "on" if new else "copy", "new" if new else "copy",
                                  width))
            sliced.append(cell(column, step, "on" if new else "old" if column < filled else "off",
                               "new" if new else "", width))
    copied = [COLUMNS + step for step in range(steps)]
    sums = f"{' + '.join(map(str, copied))} = {sum(copied)}"
    return figure(
        [panel("concatenate", "Version 3: <code>np.concatenate</code>",
               "Prefill makes an array of 5. Each decode step makes a new array, one longer, and "
               f"copies what was there: {sums} copies.", grown, steps + 1, capacity, width),
         panel("slice", "Version 4: one buffer of 5 + 4 − 1 = 8 slots",
               "Prefill writes slots 0 to 4 of a buffer of 8. Each decode step writes the next "
               "slot and copies nothing.", sliced, steps + 1, capacity, width)],
        [("on", "new", "written"), ("copy", "copy", "copied into the new array"),
         ("old", "", "stays where it is, read through a view"), ("off", "", "free")],
        f"The keys of one layer, for 4 new tokens after 5. On the way to 8 positions "
        f"<code>np.concatenate</code> copies {sums} keys and as many values, in each layer; the "
        f"slices copy none. Starting from one position, on the way to 8,192 it is 1 + 2 + … + "
        f"8,191 = {8191 * 8192 // 2:,}.")


def measured():
    """{position: [milliseconds of a decode step in versions 2, 3 and 4]}, from the tables."""
    here = Path(__file__).resolve().parent
    tables = "".join(path.read_text(encoding="utf-8")
                     for path in (here / "measurements.md", here.parent / "README.md")
                     if path.exists())
    table = re.search(r"Milliseconds for one decode step, by position, random 124M\n"
                      r"[^|]*\| position \| v2 \| v3 \| v4 \|\n\|[-: |]+\n((?:\|.*\n)+)", tables)[1]
    rows = [[float(cell.replace(",", "")) for cell in line.strip("| ").split("|")]
            for line in table.splitlines()]
    return {int(position): times for position, *times in rows}


def chart(name, heading, text, lines, labels):
    """Milliseconds by position; lines: {style: {position: milliseconds}}, labels go to the ends."""
    left, right, bottom, columns = 40, 310, 6 * LINE, 6
    most = max(max(line.values()) for line in lines.values())
    unit = 10 ** math.floor(math.log10(most / 3))
    step = unit * max(n for n in (1, 2, 5) if most >= 3 * n * unit)
    last = max(max(line) for line in lines.values())

    def x(position):
        return round(left + (right - left) * position / last, 1)

    def y(time):
        return round(bottom - (bottom - LINE) * time / (math.ceil(most / step) * step), 1)

    marks = [f'<text x="0" y="12">ms</text><text x="{(left + right) / 2:g}" y="{bottom + 38}" '
             f'text-anchor="middle">position</text>']
    for time in range(0, math.ceil(most / step) * step + 1, step):
        marks.append(f'<path class="{"grid" if time else "axis"}" d="M{left} {y(time)}H{right}"/>'
                     f'<text x="{left - 6}" y="{y(time) + 4}" text-anchor="end">{time:,}</text>')
    for position in range(0, last + 1, 250):
        marks.append(f'<text x="{x(position)}" y="{bottom + 19}" text-anchor="middle">'
                     f'{position:,}</text>')
    for style, line in lines.items():
        points = [f"{x(position)} {y(time)}" for position, time in line.items()]
        marks.append(f'<path class="line {style}" d="M{"L".join(points)}"/>'
                     f'<path class="dots {style}" d="M{"h0M".join(points)}h0"/>')
    for time, above, words in labels:
        marks.append(f'<text x="{right + 5}" y="{y(time) - above}" text-anchor="end">'
                     f'{words}</text>')
    return panel(name, heading, text, marks, 8, columns)


def steps():
    """Version 4: how long a decode step takes, with each version."""
    times = measured()
    v2, v3, v4 = ({position: row[i] for position, row in times.items()} for i in range(3))
    (first, last), ends = (min(times), max(times)), []
    for position in (first, last):
        now = [f"{time:,.0f}" for time in times[position]]
        ends.append(f"At position {position:,}, a step takes {now[0]} milliseconds in version 2, "
                    f"{now[1]} in version 3 and {now[2]} in version 4.")
    return figure(
        [chart("steps-all", "A decode step in all three versions", ends[1],
               {"v2": v2, "v3": v3, "v4": v4},
               [(v2[last], 9, "version 2"), (v3[last], 12, "versions 3 and 4")]),
         chart("steps-cached", "The two with a cache alone",
               f"Version 3 goes from {v3[first]:.0f} to {v3[last]:.0f} ms, version 4 from "
               f"{v4[first]:.0f} to {v4[last]:.0f}.", {"v3": v3, "v4": v4},
               [(v3[last], 9, "version 3"), (v4[last], -26, "version 4")])],
        [], f"{' '.join(ends)} Measured with random weights of the sizes of GPT-2 124M, on two "
            f"cores of an AMD EPYC; <a href=measurements.md>the measurements</a> have the tables.")
