"""The command line, by running it: text on stdout, all else on stderr, one line for a mistake."""
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import gpt2_v1
from conftest import ROOT
from helpers import write_scripted_model

SCRIPTS = ["gpt2_v1.py", "gpt2_v2_padding.py", "gpt2_v3_kvcache.py", "gpt2_v4_prealloc.py"]
BATCHED = SCRIPTS[1:]
V3 = "gpt2_v3_kvcache.py"
PROMPTS = ["Once upon a time", "", "The old woman said to the boy,", " "]
# a plain environment: no PYTHONUNBUFFERED, no TQDM_DISABLE
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith(("PYTHON", "TQDM"))}


def command(script, *arguments):
    return [sys.executable, str(ROOT / script), *arguments]


def run(script, *arguments, env=ENVIRONMENT, **options):
    return subprocess.run(command(script, *arguments), capture_output=True, timeout=60, env=env,
                          **options)


def start(script, *arguments):
    """A process that takes Ctrl-C, which a shell's background jobs do not."""
    return subprocess.Popen(
        command(script, *arguments), env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def text_of(script, *arguments, **options):
    """stdout, of a run that went well and said so on stderr."""
    result = run(script, *arguments, **options)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


@pytest.fixture(scope="module")
def expected(tiny):
    """{prompt: the prompt and 12 tokens}, by v1's generate; an empty prompt is <|endoftext|>."""
    encoder, hparams, params = tiny
    texts = {}
    for prompt in PROMPTS:
        ids = encoder.encode(prompt) or [encoder.end_of_text]
        new_ids = gpt2_v1.generate(ids, params, hparams["n_head"], 12)
        texts[prompt] = prompt + encoder.decode(new_ids)
    return texts


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_the_four_print_the_same(script, prompt, expected, tmp_path):
    """From any folder, too."""
    assert text_of(script, prompt, "-n", "12", cwd=tmp_path) == expected[prompt] + "\n"


@pytest.mark.parametrize("script", BATCHED)
def test_a_batch_prints_what_its_prompts_print_alone(script, expected):
    text = text_of(script, *PROMPTS, "--n_tokens_to_generate", "12")
    assert text == "\n\n".join(expected[prompt] for prompt in PROMPTS) + "\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_progress_and_speed_go_to_stderr(script):
    """One tick a token, then a line: tokens, seconds, tokens a second."""
    began = time.monotonic()
    stderr = run(script, "Once", "-n", "7").stderr.decode()
    assert "7/7" in stderr
    line = re.fullmatch(r"7 tokens in (\d+\.\d\d) s, \d+\.\d tokens/s", stderr.splitlines()[-1])
    assert float(line[1]) <= time.monotonic() - began


@pytest.mark.parametrize("script", BATCHED)
def test_all_tokens_of_a_batch_count(script):
    stderr = run(script, *PROMPTS, "-n", "3").stderr.decode()
    assert "3/3" in stderr and stderr.splitlines()[-1].startswith("12 tokens in ")


def test_40_tokens_by_default(tiny):
    encoder, hparams, params = tiny
    ids = encoder.encode("Once upon a time")
    new_ids = gpt2_v1.generate(ids, params, hparams["n_head"], 40)
    assert text_of(V3, "Once upon a time") == "Once upon a time" + encoder.decode(new_ids) + "\n"


def test_a_prompt_that_begins_with_a_dash():
    assert text_of(V3, "-n", "1", "--", "-n").startswith("-n")
    assert text_of(V3, "--", "-n", "--model").startswith("-n")
    assert text_of(V3, "--", "--").startswith("--")


def test_options_and_prompts_in_any_order(expected):
    text = text_of(V3, PROMPTS[0], "-n", "12", PROMPTS[2])
    assert text == f"{expected[PROMPTS[0]]}\n\n{expected[PROMPTS[2]]}\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_cut_at_the_end_of_the_text(script, tmp_path):
    """The model says c, d, <|endoftext|> and e; bytes 0x21 to 0x7E have the ids 0 to 93."""
    c, d, e, end = 66, 67, 68, 256
    write_scripted_model(tmp_path / "scripted", [0, c, d, end, e, e])
    arguments = ["ab", "-n", "5", "--models_dir", str(tmp_path), "--model", "scripted"]
    assert text_of(script, *arguments) == "abcd\n"
    if script in BATCHED:
        assert text_of(script, "ab", *arguments) == "abcd\n\nabcd\n"


def test_a_model_by_its_folder(tmp_path):
    write_scripted_model(tmp_path / "m", [66, 67])
    assert text_of(V3, "a", "-n", "2", "--model", "m", cwd=tmp_path) == "acd\n"
    assert text_of(V3, "a", "-n", "2", "--model", str(tmp_path / "m")) == "acd\n"


def test_bytes_that_are_no_utf8(tmp_path):
    """The prompt's go out as they came in, the model's (0xFF has the id 187) as U+FFFD."""
    write_scripted_model(tmp_path / "m", [66, 187])
    result = run(V3, b"\xe9", "-n", "2", "--model", str(tmp_path / "m"))
    assert result.stdout == b"\xe9c\xef\xbf\xbd\n"


def test_utf8_whatever_the_locale(tmp_path):
    write_scripted_model(tmp_path / "m", [187])
    environment = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    result = run(V3, "a", "-n", "1", "--model", str(tmp_path / "m"), env=environment)
    assert result.stdout == "a\ufffd\n".encode()


def test_help():
    result = run(V3, "-h")
    assert result.returncode == 0 and not result.stderr
    text = " ".join(result.stdout.decode().split())
    for word in "prompt", "-n", "--n_tokens_to_generate", "default: 40", "--model", "--models_dir":
        assert word in text


@pytest.mark.parametrize("script, arguments, says", [
    (V3, [], "prompt"),
    (V3, ["-n", "5"], "prompt"),
    ("gpt2_v1.py", ["one", "two"], "gpt2_v2_padding.py"),
    (V3, ["word " * 600], "context of 512: shorten the prompt"),
    (V3, ["x", "-n", "0"], "0"),
    (V3, ["x", "-n", "-3"], "-3"),
    (V3, ["x", "word " * 600], "context of 512: shorten the prompt"),
    (V3, ["x", "-n", "513"], "take -n 512"),
    (V3, ["x", "-n", "99999999999999999999999"], "take -n 512"),
    (V3, ["x", "-n", "ten"], "'ten'"),
    (V3, ["x", "-n", "2.5"], "'2.5'"),
    (V3, ["x", "-n"], "-n"),
    (V3, ["x", "--model", "124N"], "'124N'"),
    (V3, ["x", "--model", "a\nb"], "tiny"),
    (V3, ["x", "--model", "x" * 5000], "xxx"),
    (V3, ["x", "--models_dir", "/no\nwhere"], "/no where"),
    (V3, ["x", "--model", str(ROOT / "tests")], "config.json"),
    (V3, ["x", "--temperature", "1"], "--temperature"),
    (V3, ["x", "--mod", "tiny"], "unknown option '--mod'"),
    (V3, ["--x\ny"], "unknown option '--x"),
    (V3, ["-prompt"], "put -- before a prompt that begins with -"),
], ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(script, arguments, says):
    result = run(script, *arguments)
    [line] = result.stderr.decode().splitlines()
    assert result.returncode == 2
    assert result.stdout == b""
    assert line.startswith(f"{script}: error: ")
    assert says in line


def test_a_broken_model_is_one_line(tmp_path):
    write_scripted_model(tmp_path / "m", [66])
    (tmp_path / "m" / "config.json").write_text("{}")
    result = run(V3, "x", "--model", str(tmp_path / "m"))
    [line] = result.stderr.decode().splitlines()
    assert result.returncode == 2 and "wte.weight is [257, 257], not [50257, 768]" in line


def test_the_last_position_of_the_context(tmp_path):
    assert text_of(V3, "x", "-n", "512").startswith("x")
    write_scripted_model(tmp_path / "m", [66, 67, 68])
    assert text_of(V3, "abc", "-n", "1", "--model", "m", cwd=tmp_path) == "abce\n"
    assert b"take -n 1\n" in run(V3, "abc", "-n", "2", "--model", "m", cwd=tmp_path).stderr


def test_a_programming_error_keeps_its_traceback(tmp_path):
    """A ValueError out of generate is a bug, and no mistake of the user."""
    program = ("import sys, gpt2_v1; sys.argv[1:] = ['x']\n"
               "def generate(*arguments): raise ValueError('a bug')\n"
               "gpt2_v1.generate = generate; gpt2_v1.main()")
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True,
                            env=ENVIRONMENT)
    assert result.returncode == 1
    assert b"Traceback" in result.stderr and b"ValueError: a bug" in result.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c(script):
    with start(script, "Once", "-n", "500") as process:
        seen = process.stderr.read(60)            # the bar has begun
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == b"" and b"generating" in seen
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_closed_pipe(script):
    with start(script, "Once", "-n", "2") as process:
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 141
    assert b"Traceback" not in stderr and b"Exception" not in stderr


def test_help_into_a_closed_pipe():
    with start(V3, "-h") as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_stderr_into_the_same_closed_pipe():
    with subprocess.Popen(command(V3, "Once"), env=ENVIRONMENT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        process.stdout.close()
    assert process.returncode == 141


def test_main_in_a_notebook(monkeypatch, tiny):
    """There stdout is no file of Python's."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["gpt2_v1.py", "Once upon a time", "-n", "1"])
    monkeypatch.setattr(sys, "stdout", output)
    gpt2_v1.main()
    assert output.getvalue().startswith("Once upon a time")


def test_requests_waits_for_a_download():
    program = "import sys, gpt2_v4_prealloc; sys.exit('requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
