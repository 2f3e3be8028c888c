"""Two versions of a function side by side: lines aligned, changed words marked, code in colour.

Narrow screens show them as one column, so each line has its place there as well, --o.
"""
import ast
import difflib
import io
import keyword
import re
import tokenize
from functools import lru_cache
from html import escape
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"v1": "gpt2_v1.py", "v2": "gpt2_v2_padding.py", "v3": "gpt2_v3_kvcache.py",
           "v4": "gpt2_v4_prealloc.py"}
TOP = "top of the file"
EMPTY = "<div class=e></div>\n"                   # where the other side has a line


def read(version):
    return (ROOT / SCRIPTS[version]).read_text(encoding="utf-8")


@lru_cache(None)
def parts(version):
    """{function or class: (first line, line after)}; the last one goes to the end of the file."""
    body, end = ast.parse(read(version)).body, len(read(version).splitlines())
    found = {TOP: 1} | {node.name: node.lineno for node in body if hasattr(node, "name")}
    starts = [*found.values(), end + 3]           # two empty lines before each
    return {name: (start, after - 2) for name, start, after in zip(found, starts, starts[1:])}


@lru_cache(None)
def painted(version):
    """[(line, [a letter for each character: what colour it has])]"""
    lines = read(version).splitlines()
    paint = [[""] * len(line) for line in lines]

    def fill(start, end, letter):
        for row in range(start[0], end[0] + 1):
            line = lines[row - 1]
            first = start[1] if row == start[0] else len(line) - len(line.lstrip())
            last = end[1] if row == end[0] else len(line)
            paint[row - 1][first:last] = letter * len(paint[row - 1][first:last])

    before, f_strings = "", []                    # from Python 3.12 on, an f-string is many tokens
    for kind, text, start, end, _ in tokenize.generate_tokens(io.StringIO(read(version)).readline):
        name = tokenize.tok_name[kind]
        letter = {"COMMENT": "c", "STRING": "s", "NUMBER": "n"}.get(name, "")
        if name == "NAME":
            letter = "k" if keyword.iskeyword(text) else "f" if before in ("def", "class") else ""
        if name == "FSTRING_START":
            f_strings.append(start)
        elif name == "FSTRING_END":
            start, letter = f_strings.pop(), "s"
        if letter:
            fill(start, end, letter)
        before = text
    return list(zip(lines, paint))


def lines_of(version, name):
    """[(line number, text)] of a part; nothing where the version doesn't have it."""
    start, after = parts(version).get(name, (1, 1))
    return [(number, painted(version)[number - 1][0]) for number in range(start, after)]


@lru_cache(None)
def likeness(a, b):
    """0 to 1.2; a line is likelier to have become one that begins with the same word."""
    ratio = difflib.SequenceMatcher(None, a.strip(), b.strip(), autojunk=False).ratio()
    return ratio + 0.2 * (a.split()[:1] == b.split()[:1])


def paired(old, new):
    """Changed lines as rows (old, new, "edited" or "other"); those most alike are paired first."""
    ratio, i, j = max(((likeness(a[1], b[1]), -i, -j) for i, a in enumerate(old)
                       for j, b in enumerate(new)), default=(0, 0, 0))
    if ratio < 0.65:
        return [(*lines, "other") for lines in zip_longest(old, new)]
    return [*paired(old[:-i], new[:-j]), (old[-i], new[-j], "edited"),
            *paired(old[1 - i:], new[1 - j:])]


def aligned(old, new):
    """Rows (old line or None, new line or None, "same", "edited" or "other") of a part."""
    texts = [[text for _, text in lines] for lines in (old, new)]
    matcher, rows = difflib.SequenceMatcher(None, *texts, autojunk=False), []
    for tag, i, after_i, j, after_j in matcher.get_opcodes():
        lines = old[i:after_i], new[j:after_j]
        rows += [(a, b, "same") for a, b in zip(*lines)] if tag == "equal" else paired(*lines)
    return rows


def changed_words(line, other):
    """The characters of line, as a set of columns, that are in words which other doesn't have."""
    words, others = (re.findall(r"\w+|\s+|.", text) for text in (line, other))
    matcher, columns = difflib.SequenceMatcher(None, words, others, autojunk=False), set()
    for tag, i, after_i, _, _ in matcher.get_opcodes():
        text, begin = "".join(words[i:after_i]), len("".join(words[:i]))
        if tag != "equal" and text.strip():
            begin += len(text) - len(text.lstrip())
            columns.update(range(begin, begin + len(text.strip())))
    return columns


def code(version, number, marked=(), mark="ins"):
    """A line in colour, with changed words marked; a comment at its end wraps as a whole."""
    line, paint = painted(version)[number - 1]
    tail = paint.index("c") if "c" in paint and line[:paint.index("c")].strip() else len(line)
    out, runs = "", [(column in marked, letter, column >= tail)
                     for column, letter in enumerate(paint)]
    column = 0
    while column < len(line):
        end = column
        while end < len(line) and runs[end] == runs[column]:
            end += 1
        text, (is_marked, letter, _) = escape(line[column:end], quote=False), runs[column]
        text = f"<i class={letter}>{text}</i>" if letter else text
        out += "<span>" * (column == tail) + (f"<{mark}>{text}</{mark}>" if is_marked else text)
        column = end
    return out + "</span>" * (tail < len(line))


@lru_cache(None)
def rows_of(before, after, name):
    return aligned(lines_of(before, name), lines_of(after, name))


def changed(before, after):
    """Names of the parts that differ, in the order of the later file."""
    return [name for name in parts(after)
            if any(kind != "same" for *_, kind in rows_of(before, after, name))]


@lru_cache(None)
def moved(before, after):
    """{line that went from one part to another as it is: (from, to)}"""
    places = {}, {}
    for name in changed(before, after):
        for *lines, kind in rows_of(before, after, name):
            for place, line in zip(places, lines):
                if kind == "other" and line and line[1].strip():
                    place[line[1]] = name
    return {line: (places[0][line], places[1][line]) for line in places[0].keys() & places[1].keys()
            if places[0][line] != places[1][line]}


def line_html(number, inner, kind="", sign=" "):
    """Wrapped, it goes on under its beginning: the style needs to know how far it is indented."""
    indent = min((len(inner) - len(inner.lstrip(" "))) // 4, 3)
    return (f'<div{kind and f" class={kind}"}><i>{number}</i><b>{sign}</b>'
            f'<code{indent and f" class=i{indent}" or ""}>{inner}</code></div>\n')


def side(version, name, body):
    """Lines of one version, under a line that names it."""
    return (f'<div class="side" role="group" aria-label="{name} in version {version[1]}">'
            f'<p>version {version[1]}, {SCRIPTS[version]}</p>{body}</div>')


def one_side(version, name, kind="", sign=" "):
    return side(version, name, "".join(line_html(number, code(version, number), kind, sign)
                                       for number, _ in lines_of(version, name)))


def whole(version):
    lines = enumerate(read(version).splitlines(), 1)
    return side(version, "all", "".join(line_html(number, code(version, number))
                                        for number, _ in lines))


def column(version, lines, kind, sign, mark):
    """HTML for one side of each row; lines are (line or None, counterpart, kind of row)."""
    for line, other, row in lines:
        if line is None:
            yield EMPTY
        elif row == "same":
            yield line_html(line[0], code(version, line[0]), "u" if sign == "−" else "")
        else:
            words = changed_words(line[1], other[1]) if row == "edited" else ()
            if len(words) > 0.6 * len(line[1].strip()):
                words = ()                        # as good as a new line
            yield line_html(line[0], code(version, line[0], words, mark), kind, sign)


def with_moves(rows, left, right, moves):
    """(old, new, kind) as HTML, with a line that says so above the lines that only moved."""
    last = ""
    for (old, new, kind), *cells in zip(rows, left, right):
        for which, line in enumerate((old, new)):
            where = moves.get(line[1], ("", ""))[1 - which] if line and kind == "other" else ""
            if where and where != last:
                extra = [EMPTY] * 2
                lines = list(moves.values()).count(moves[line[1]])
                words = f"{lines} lines moved {'from' if which else 'to'} {where}:"
                extra[which] = line_html("", f"    <small>{words}</small>", "da"[which])
                yield *extra, kind
            if line:
                last = where
        yield *cells, kind


def placed(cells):
    """The two columns, with each line's place in one: where lines are replaced, old ones first."""
    sides, place = ([], []), 0
    for kind, run in groupby(cells, key=itemgetter(2)):
        # a line that was edited stands right above what it became
        for lines in ([run] if kind == "other" else [[row] for row in run]):
            for done, todo in zip(sides, list(zip(*lines))):
                for html in todo:
                    place += html != EMPTY
                    done.append(html if html == EMPTY else
                                html.replace("<div", f'<div style="--o:{place}"', 1))
    return ["".join(done) for done in sides]


def two_sides(before, after, name):
    rows = rows_of(before, after, name)
    left = column(before, rows, "d", "−", "del")
    right = column(after, [(new, old, kind) for old, new, kind in rows], "a", "+", "ins")
    cells = list(with_moves(rows, left, right, moved(before, after)))
    bodies = placed(cells)
    return (f'<div class="diff" style="--rows:{len(cells) + 1}">{side(before, name, bodies[0])}'
            f'{side(after, name, bodies[1])}</div>')
