"""The README and docs/measurements.md say nothing that is not so: code, links and commands."""
import contextlib
import io
import re
import shlex

import pytest

import benchmark
import gpt2_v1
import utils
from helpers import ROOT

PAGES = ["README.md", "docs/measurements.md", "models/tiny/README.md"]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
# the heading that a block of code is under -> the file that it is from
FILES = {"### Version 1": "gpt2_v1.py", "### Version 2": "gpt2_v2_padding.py",
         "### Version 3": "gpt2_v3_kvcache.py", "### Version 4": "gpt2_v4_prealloc.py"}


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("heading", FILES)
def test_code_is_verbatim(heading):
    """As it stands in the file that the section is about."""
    [section] = [part for part in re.split(r"^(?=#)", README, flags=re.MULTILINE)
                 if part.startswith(heading)]
    source = (ROOT / FILES[heading]).read_text(encoding="utf-8")
    assert blocks(section, "python")
    assert all(block in source for block in blocks(section, "python"))


def test_no_other_code():
    assert sum(len(blocks(text, "python")) for text in TEXTS.values()) == len(FILES)


def test_quoted_lines_stand_in_the_scripts():
    """In the answers, what is in back quotes and has a space is code, or the name of a test."""
    sources = "".join(path.read_text(encoding="utf-8") for path in
                      [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py")])
    answers = README[README.index("## Check your understanding"):README.index("## Beyond it")]
    quoted = re.findall("`([^`]+)`", answers)
    assert len(quoted) > 10
    assert [code for code in quoted if code not in sources] == []


def test_from_python(tiny):
    """It prints what version 1 says to each prompt."""
    [block] = blocks(README, "py")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(block, {})
    encoder, hparams, params = tiny
    prompts = [encoder.encode(text) for text in ("Once upon a time", "The wolf")]
    expected = [encoder.decode(gpt2_v1.generate(ids, params, hparams["n_head"], 20))
                for ids in prompts]
    assert output.getvalue() == "".join(f"{text}\n" for text in expected)


def test_the_text_that_it_shows(tiny):
    encoder, hparams, params = tiny
    ids = encoder.encode("Once upon a time")
    text = "Once upon a time" + encoder.decode(gpt2_v1.generate(ids, params, hparams["n_head"], 40))
    assert f'gpt2_v3_kvcache.py "Once upon a time"\n{text}\n```' in README


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Files are there, and so are headings. (What is on the web is not looked up.)"""
    here = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        path, _, anchor = link.partition("#")
        if not link.startswith("http"):
            assert (here / path).exists(), link
        if anchor and not path:
            headings = re.findall(r"^#+ (.*)", TEXTS[page], re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]


def commands():
    for page in PAGES[:2]:
        lines = "\n".join(blocks(TEXTS[page], "sh")).splitlines()
        lines += re.findall(r"`(\.venv/bin/python [^`]+)`", TEXTS[page])
        yield from (command.strip() for line in lines if line for command in line.split("&&"))


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands(command, monkeypatch):
    """Each is one that the parser of its program takes, or installs something."""
    words = [word for word in shlex.split(command) if word != "OPENBLAS_NUM_THREADS=1"]
    if words[0] == "python3" or words[0] == ".venv/bin/pip" or words[1:] == ["-m", "pytest"]:
        assert words[1] in ("-m", "install")
        return
    assert words[0] == ".venv/bin/python"
    monkeypatch.setattr("sys.argv", words[1:])
    if words[1] == "benchmark.py":
        assert benchmark.parse_options().command == words[2]
    elif words[1] == "-m":
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
    else:
        assert (ROOT / words[1]).is_file()
        assert utils.parse_prompts_and_options(utils.make_parser("")).prompts


def test_size():
    """At most 300 lines; and no table of the README is wider than seven columns."""
    assert len(README.splitlines()) <= 300
    assert max(line.count("|") - 1 for line in README.splitlines() if line.startswith("|")) <= 7
