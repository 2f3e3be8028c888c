"""docs/index.html is up to date, says what is so, and can be read by everybody."""
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import gpt2_v3_kvcache
from conftest import ROOT
from gpt2_v4_prealloc import kv_cache_bytes

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import diffs  # noqa: E402
import drawings  # noqa: E402
import sidebyside  # noqa: E402

VOID = {"meta", "link", "br", "wbr", "img", "rect", "path"}


class Page(HTMLParser):
    """All tags with their attributes; and each line of code as (version, number, text)."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.code, self.version, self.line = [], [], [], None, None
        self.prose, self.diffs = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes))
        if attributes.get("class") == "side":
            self.version = "v" + re.search(r"version (\d)", attributes["aria-label"])[1]
        if attributes.get("class") == "diff":
            self.diffs.append([])
        if tag == "div" and "--o" in attributes.get("style", ""):
            place = int(attributes["style"].split(":")[1])
            self.diffs[-1].append([place, attributes.get("class"), None, ""])
        if tag == "code" and self.line is not None:
            self.code.append((self.version, self.line, ""))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        opened, attributes = self.open.pop()
        assert tag == opened, f"</{tag}> ends <{opened} {attributes}>"
        if tag == "div":
            self.line = None

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if tags[-2:] == ["div", "i"]:
            self.line = int(data) if data.isdigit() else None
            if "--o" in self.open[-2][1].get("style", ""):
                self.diffs[-1][-1][2] = self.line
        elif self.line is not None and "code" in tags:
            version, line, text = self.code[-1]
            self.code[-1] = version, line, text + data
            if any("--o" in attributes.get("style", "") for _, attributes in self.open):
                self.diffs[-1][-1][-1] += data
        elif not {"code", "style"} & set(tags):
            self.prose += data


@pytest.fixture(scope="module")
def text():
    return (DOCS / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_it_is_up_to_date(text):
    assert text == diffs.page(), "docs/index.html is stale: run python docs/diffs.py"


def test_every_changed_function_has_a_note_and_every_note_a_changed_function():
    changed = {(after, name) for before, after in diffs.STEPS
               for name in sidebyside.changed(before, after)}
    assert changed - {(after, sidebyside.TOP) for _, after in diffs.STEPS} == set(diffs.NOTES)


@pytest.mark.parametrize("step, name", diffs.NOTES)
def test_a_note_says_why_and_then_what_otherwise_and_the_shapes(step, name):
    """These two where there is something to say; and no shapes that are what they were."""
    parts = [" ".join(part.split()) for part in diffs.NOTES[step, name].split("\n\n")]
    kinds = [part.split(": ")[0] if re.match("Otherwise: |Shapes: ", part) else "why"
             for part in parts]
    assert re.fullmatch("(why )+(Otherwise )?(Shapes )?", " ".join([*kinds, ""]))
    for row in parts[-1].removeprefix("Shapes: ").split("; ") if kinds[-1] == "Shapes" else []:
        before, _, after = row.split(": ", 1)[1].partition(" => ")
        assert before != after


def test_most_notes_say_what_otherwise():
    assert sum("Otherwise: " in note for note in diffs.NOTES.values()) > len(diffs.NOTES) * 2 / 3


@pytest.mark.parametrize("step, name", diffs.NOTES)
def test_code_in_a_note_stands_in_the_scripts(step, name):
    """But for ``what would be wrong``, in two backticks."""
    [before] = [before for before, after in diffs.STEPS if after == step]
    scripts = sidebyside.read(before) + sidebyside.read(step)
    text = re.sub("``.+?``", "", " ".join(diffs.NOTES[step, name].split()))
    assert [code for code in re.findall("`(.+?)`", text) if code not in scripts] == []


def test_code_is_that_of_the_scripts(page):
    """Verbatim, under its line numbers; and all of it."""
    scripts = {version: sidebyside.read(version).splitlines() for version in sidebyside.SCRIPTS}
    for version, number, line in page.code:
        assert line == scripts[version][number - 1]
    for version, lines in scripts.items():
        shown = {number for other, number, _ in page.code if other == version}
        assert [line for number, line in enumerate(lines, 1) if line and number not in shown] == []


def test_on_a_narrow_screen_a_diff_is_in_one_column(page):
    """Without its + lines it is the old function, without its − lines the new one."""
    names = [(before, after, name) for before, after in diffs.STEPS
             for name in sidebyside.parts(after)
             if name in sidebyside.changed(before, after) and name in sidebyside.parts(before)]
    assert len(page.diffs) == len(names)
    for (before, after, name), lines in zip(names, page.diffs):
        assert len({place for place, *_ in lines}) == len(lines)
        shown = [(kind, text) for _, kind, number, text in sorted(lines)
                 if kind != "u" and number is not None]
        for version, other in (before, "a"), (after, "d"):
            assert ([text for kind, text in shown if kind != other]
                    == [text for _, text in sidebyside.lines_of(version, name)])


def test_the_table_names_the_files_of_beyond(text):
    table = text[text.index('<table class="beyond">'):].replace("<wbr>", "")
    named = re.findall(r"<th scope=\"row\"><code>(\w+\.py)</code>", table)
    assert sorted(named) == sorted(path.name for path in (ROOT / "beyond").glob("*.py"))


def test_one_kind_of_apostrophe(page):
    assert re.findall(r".{9}\w'\w.{9}|.{9}\w' .{9}", page.prose) == [] and "’" in page.prose


def test_it_needs_nothing_from_elsewhere_and_is_small(text, page):
    assert len(text.encode()) < 300_000
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert {"script", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)


def test_links_and_pictures_resolve(page):
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        for key in "aria-labelledby", "href", "src":
            for target in attributes.get(key, "").split():
                if key == "aria-labelledby":
                    assert target in ids
                elif target.startswith("#"):
                    assert target[1:] in ids
                elif target != "data:,":
                    assert (DOCS / target).is_file() and ".." not in target


def test_it_can_be_read_by_ear_and_keyboard(page):
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:]))
    for tag, attributes in page.tags:
        if tag == "svg":
            assert "aria-labelledby" in attributes or attributes["aria-hidden"] == "true"
        if tag == "img":
            assert attributes["alt"]
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if "tabindex" in attributes:
            assert attributes["aria-label"]
    assert ("html", {"lang": "en"}) in page.tags


def luminance(colour):
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    darker, lighter = sorted([luminance(a), luminance(b)])
    return (lighter + 0.05) / (darker + 0.05)


LINES = ["code", "gone", "come"]
CODE = [*LINES, "gone-word", "come-word"]
ON = {"text": ["page", "note", "old", "new", "copy", *CODE], "soft": ["page", "note", *LINES],
      "link": ["page", "note"], "on-text": ["on"],
      **{name: CODE for name in ("keyword", "string", "comment", "number", "name")}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(text, scheme):
    """WCAG AA: 4.5 for text, 3 for the edges that a drawing needs."""
    style = text.split("@media screen and (prefers-color-scheme: dark)")[scheme == "dark"]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", style))
    assert {f"{name} on {ground}": round(contrast(colours[name], colours[ground]), 2)
            for name, grounds in ON.items() for ground in grounds
            if contrast(colours[name], colours[ground]) < 4.5} == {}
    assert contrast(colours["edge"], colours["page"]) > 3 < contrast(colours["on"], colours["page"])


def test_drawings_show_what_generate_does(tiny, monkeypatch):
    """Positions and masks of prefill and two decode steps, cell by cell."""
    _, hparams, params = tiny
    passes, gpt2 = [], gpt2_v3_kvcache.gpt2

    def noting(input_ids, pos_ids, mask, *args, **kwargs):
        passes.append((pos_ids, mask))
        return gpt2(input_ids, pos_ids, mask, *args, **kwargs)

    monkeypatch.setattr(gpt2_v3_kvcache, "gpt2", noting)
    batch = gpt2_v3_kvcache.pad_batch([range(len(row)) for row in drawings.ROWS])
    gpt2_v3_kvcache.generate(*batch, params, hparams["n_head"], len(drawings.NEXT[0]))
    for pos_ids, mask in passes:
        T, S = mask.shape[2:]
        for row, prompt in enumerate(drawings.ROWS):
            padding = drawings.COLUMNS - len(prompt)
            assert drawings.positions(row, S)[:padding] == ["–"] * padding
            real = slice(max(padding - (S - T), 0), None)
            assert drawings.positions(row, S)[S - T:][real] == pos_ids[row, real].tolist()
            drawn = [[drawings.look(row, query, key) == "on" for key in range(S)]
                     for query in range(S - T, S)]
            np.testing.assert_array_equal(drawn, mask[row, 0] == 0)


def test_costs_are_those_of_the_formula():
    for (n_layer, n_head, head_dim, size), row in zip(diffs.MODELS.values(),
                                                      diffs.cost_rows().splitlines()):
        per_token = kv_cache_bytes(n_layer, 1, 1, n_head, head_dim, size)
        assert f"</th><td>{per_token // 1024}</td>" in row and per_token % 1024 == 0


def test_the_charts_show_what_was_measured(text):
    times = drawings.measured()
    assert len(times) > 5 and all(len(row) == 3 for row in times.values())
    for time in times[max(times)]:
        assert f"{time:,.0f} in version" in text or f"{time:,.0f} milliseconds in version" in text
