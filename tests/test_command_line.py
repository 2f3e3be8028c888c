"""The command line, by running it: text on stdout, all else on stderr, one line for a mistake."""
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types

import pytest

import gpt2_v1
import utils
from helpers import (ENVIRONMENT, ROOT, command, run, run_here, start,
                     write_scripted_model)

SCRIPTS = ["gpt2_v1.py", "gpt2_v2_padding.py", "gpt2_v3_kvcache.py", "gpt2_v4_prealloc.py"]
BATCHED = SCRIPTS[1:]
V3 = "gpt2_v3_kvcache.py"
FOLDERS = ROOT / "tests" / "data" / "folders"
PROMPTS = ["Once upon a time", "", "The old woman said to the boy,", " "]


def run_in_shell(script, rest, **options):
    """Run a script as a shell does, with redirections in the rest of the line."""
    line = f"{shlex.join(command(script))} {rest}"
    return subprocess.run(line, shell=True, capture_output=True, timeout=60, env=ENVIRONMENT,
                          **options)


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
def test_the_four_print_the_same(script, expected, tmp_path):
    """From any folder, too."""
    assert text_of(script, PROMPTS[0], "-n", "12", cwd=tmp_path) == expected[PROMPTS[0]] + "\n"
    assert run_here(script, PROMPTS[1], "-n", "12")[1] == expected[PROMPTS[1]] + "\n"


@pytest.mark.parametrize("script", BATCHED)
def test_a_batch_prints_what_its_prompts_print_alone(script, expected):
    _, text, _ = run_here(script, *PROMPTS, "--n_tokens_to_generate", "12")
    assert text == "\n\n".join(expected[prompt] for prompt in PROMPTS) + "\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_progress_and_speed_go_to_stderr(script):
    """One tick a token, then a line: tokens, seconds, tokens a second."""
    began = time.monotonic()
    _, _, stderr = run_here(script, "Once", "-n", "7")
    assert "7/7" in stderr
    line = re.fullmatch(r"7 tokens in (\d+\.\d\d) s, \d+\.\d tokens/s", stderr.splitlines()[-1])
    assert float(line[1]) <= time.monotonic() - began


@pytest.mark.parametrize("script", BATCHED)
def test_all_tokens_of_a_batch_count(script):
    _, _, stderr = run_here(script, *PROMPTS, "-n", "3")
    assert "3/3" in stderr and stderr.splitlines()[-1].startswith("12 tokens in ")


def test_40_tokens_by_default(tiny):
    encoder, hparams, params = tiny
    ids = encoder.encode("Once upon a time")
    new_ids = gpt2_v1.generate(ids, params, hparams["n_head"], 40)
    text = run_here(V3, "Once upon a time")[1]
    assert text == "Once upon a time" + encoder.decode(new_ids) + "\n"


def test_a_prompt_that_begins_with_a_dash():
    for arguments, begins in [(["-n", "1", "--", "-n"], "-n"), (["--", "-n", "--model"], "-n"),
                              (["--", "--"], "--")]:
        assert run_here(V3, *arguments)[1].startswith(begins)


def test_options_and_prompts_in_any_order(expected):
    text = run_here(V3, PROMPTS[0], "-n", "12", PROMPTS[2])[1]
    assert text == f"{expected[PROMPTS[0]]}\n\n{expected[PROMPTS[2]]}\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_cut_at_the_end_of_the_text(script, tmp_path):
    """The model says c, d, <|endoftext|> and e; bytes 0x21 to 0x7E have the ids 0 to 93.

    Then generation_config.json says that d or e ends a text.
    """
    c, d, e, end = 66, 67, 68, 256
    write_scripted_model(tmp_path / "scripted", [0, c, d, end, e, e])
    arguments = ["ab", "-n", "5", "--models_dir", str(tmp_path), "--model", "scripted"]
    assert run_here(script, *arguments)[1] == "abcd\n"
    if script in BATCHED:
        assert run_here(script, "ab", *arguments)[1] == "abcd\n\nabcd\n"
    (tmp_path / "scripted" / "generation_config.json").write_text(f'{{"eos_token_id": [{e}, {d}]}}')
    assert run_here(script, *arguments)[1] == "abc\n"


def test_a_model_by_its_folder(tmp_path):
    write_scripted_model(tmp_path / "m", [66, 67])
    assert text_of(V3, "a", "-n", "2", "--model", "m", cwd=tmp_path) == "acd\n"
    assert run_here(V3, "a", "-n", "2", "--model", str(tmp_path / "m"))[1] == "acd\n"


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
    status, stdout, stderr = run_here(V3, "-h")
    assert status == 0 and not stderr
    text = " ".join(stdout.split())
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
    (V3, ["-hello"], "unknown option '-hello'; put -- before a prompt that begins with -"),
    (V3, ["-name"], "unknown option '-name'"),
    (V3, ["-h\n"], "unknown option '-h"),
    (V3, ["-", "x", "-"], "read only once"),
    (V3, ["", "--model", str(FOLDERS / "no_end_of_text")], "no token with which a text begins"),
    (V3, ["zoo", "--model", str(FOLDERS / "part_of_the_alphabet")], "without the byte 0x7A"),
    (V3, ["x", "--model", str(FOLDERS / "old_layout" / "model.safetensors")],
     f"is not a folder: give the one that it is in, {FOLDERS / 'old_layout'}"),
], ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(script, arguments, says):
    status, stdout, stderr = run_here(script, *arguments)
    # on a busy machine, reading the bundled model may take long enough for a bar
    [line] = [line for line in stderr.splitlines() if line and "reading the weights" not in line]
    assert status == 2
    assert stdout == ""
    assert line.startswith(f"{script}: error: ")
    assert says in line


def test_a_mistake_at_the_shell():
    result = run(V3, "x", "-n", "ten")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"gpt2_v3_kvcache.py: error: ") and b"'ten'" in result.stderr


def test_a_broken_model_is_one_line(tmp_path):
    write_scripted_model(tmp_path / "m", [66])
    (tmp_path / "m" / "config.json").write_text("{}")
    status, _, line = run_here(V3, "x", "--model", str(tmp_path / "m"))
    assert status == 2 and "wte.weight is [257, 257], not [50257, 768]" in line


def test_the_last_position_of_the_context(tmp_path):
    write_scripted_model(tmp_path / "m", [66, 67, 68])
    assert run_here(V3, "abc", "-n", "1", "--model", str(tmp_path / "m"))[1] == "abce\n"
    assert "take -n 1\n" in run_here(V3, "abc", "-n", "2", "--model", str(tmp_path / "m"))[2]


def test_a_programming_error_keeps_its_traceback(tmp_path):
    """A ValueError out of generate is a bug, and no mistake of the user."""
    program = ("import sys, gpt2_v1; sys.argv[1:] = ['x']\n"
               "def generate(*arguments): raise ValueError('a bug')\n"
               "gpt2_v1.generate = generate; gpt2_v1.main()")
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True,
                            env=ENVIRONMENT)
    assert result.returncode == 1
    assert b"Traceback" in result.stderr and b"ValueError: a bug" in result.stderr


@pytest.mark.parametrize("script", SCRIPTS[::3])
def test_ctrl_c(script):
    with start(script, "Once", "-n", "500") as process:
        seen = process.stderr.read(60)            # the bar has begun
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == b"" and b"generating" in seen
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("script", SCRIPTS[::3])
def test_ctrl_c_while_numpy_is_imported(script, tmp_path):
    """A numpy that takes long to import, before the real one on the path."""
    (tmp_path / "numpy.py").write_text(
        "import sys, time; print('importing', file=sys.stderr, flush=True); time.sleep(30)")
    with start(script, "Once", env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}) as process:
        assert process.stderr.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")


@pytest.mark.parametrize("rest, says", [
    ("Once -n 2 > /dev/full", "can't write the text: No space left on device"),
    ("-h > /dev/full", "can't write the text: No space left on device"),
    ("Once -n 2 >&-", "standard output, for the text, is closed"),
    ("- <&-", "can't read standard input: it is closed"),
])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a full disk")
def test_streams_that_cannot_be_used(rest, says):
    """One line, and an exit status that is not 0."""
    result = run_in_shell(V3, rest)
    assert result.returncode not in (0, 120) and result.stdout == b""
    assert says in result.stderr.decode().splitlines()[-1]
    assert b"Traceback" not in result.stderr and b"Exception" not in result.stderr


def test_a_closed_stderr(expected):
    """The text comes nevertheless."""
    result = run_in_shell(V3, "'Once upon a time' -n 12 2>&-")
    assert result.returncode == 0 and result.stdout.decode() == expected[PROMPTS[0]] + "\n"


@pytest.mark.parametrize("script", SCRIPTS[::3])
def test_a_prompt_from_standard_input(script, expected):
    result = run(script, "-", "-n", "12", input=PROMPTS[2].encode() + b"\n")
    assert result.stdout.decode() == expected[PROMPTS[2]] + "\n"


@pytest.mark.parametrize("read, prompt", [
    (b"a", "a"), (b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"\na\nb\n", "\na\nb"),
    (b"a\r", "a\r"), (b"", ""), (b"\n", ""), (b"\xe9\n", "\udce9")])
def test_one_prompt_without_its_last_newline(read, prompt, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(read)))
    assert utils.read_stdin(None) == prompt


def test_standard_input_beside_other_prompts(expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPTS[2].encode())))
    _, stdout, _ = run_here(V3, PROMPTS[0], "-", "-n", "12")
    assert stdout == f"{expected[PROMPTS[0]]}\n\n{expected[PROMPTS[2]]}\n"
    assert run_here(V3, "-n", "1", "--", "-")[1].startswith("-")     # after --, it is a prompt


@pytest.mark.parametrize("script", SCRIPTS[::3])
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


def test_n_with_an_equals_sign():
    assert run_here(V3, "x", "-n=1")[0] == 0 and run_here(V3, "x", "-n1")[0] == 0


def test_n_and_a_dash():
    assert "unknown option '-n-3'" in run_here(V3, "x", "-n-3")[2]


def test_standard_input_that_cannot_be_read():
    result = run_in_shell(V3, "- 0> /dev/null")
    assert result.returncode == 2
    assert b"can't read standard input: Bad file descriptor" in result.stderr


def test_no_room_at_all(tmp_path):
    write_scripted_model(tmp_path / "m", [66, 67, 68])
    line = run_here(V3, "abcd", "-n", "1", "--model", str(tmp_path / "m"))[2]
    assert "context of 3: shorten the prompt\n" in line and "take" not in line


def test_an_empty_prompt_is_the_begin_token():
    """Whatever that is; it need not be <|endoftext|>."""
    encoder = types.SimpleNamespace(bos_token_id=258, end_of_text=0, encode=lambda text: [1, 2])
    job = types.SimpleNamespace(encoder=encoder)
    assert utils.Job.encode(job, "") == [258] and utils.Job.encode(job, "x") == [1, 2]
