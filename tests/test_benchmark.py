"""benchmark.py: what it counts and computes, and how it ends; its times are not tested."""
import os
import re
import runpy
import shutil
import signal
import sys
import types

import numpy as np
import pytest

import benchmark
import gpt2_v4_prealloc
from benchmark import by_name
from helpers import (ENVIRONMENT, ROOT, make_hparams, random_params, random_tensors, run, start,
                     to_params, write_model)
from test_logits import HPARAMS, Weight, params_of_weights


@pytest.fixture
def model():
    return benchmark.Model("random", random_params(HPARAMS), HPARAMS["n_head"])


@pytest.fixture
def call(monkeypatch, capsys):
    """Call main, as a command line would; returns its exit status, stdout and stderr."""
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
        status = 0
        try:
            benchmark.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def options_of_a_small_model(folder, n_ctx):
    hparams = make_hparams(n_vocab=257, n_ctx=n_ctx)
    write_model(folder / "small", hparams, random_tensors(hparams))
    return "--model", "small", "--models_dir", str(folder), "--runs", "1"


def assert_one_line(result, says):
    """Exit status 2, and nothing but one line on stderr that says this."""
    status, stdout, stderr = result
    assert status == 2 and stdout == ""
    assert re.fullmatch(r"benchmark\.py: error: .*\n", stderr) and says in stderr


def test_names_of_parameters():
    """The names that by_name gives them lead back to where they were."""
    params = random_params(HPARAMS)
    again = to_params(by_name(params))
    assert by_name(again).keys() == by_name(params).keys() and len(by_name(params)) == 2 + 24 + 2
    assert again["blocks"][1]["mlp"]["c_proj"]["w"] is params["blocks"][1]["mlp"]["c_proj"]["w"]
    assert again["ln_f"]["g"] is params["ln_f"]["g"]


@pytest.mark.parametrize("T, n, uncached, cached", [(10, 20, 390, 29), (3, 3, 12, 5)])
def test_positions(model, T, n, uncached, cached):
    """10 + 11 + ... + 29 is 390, 10 + 19 is 29; 3 + 4 + 5 is 12, 3 + 2 is 5. In each row."""
    for batch in 1, 2:
        positions = [model.generate(module, model.prompts(batch, T), n)[2]
                     for module in benchmark.VERSIONS.values()]
        assert positions == [batch * uncached, batch * cached, batch * cached]


@pytest.mark.parametrize("version", benchmark.VERSIONS)
def test_a_time_for_each_token(model, version):
    """And the tokens that the script itself generates, which is left as it was."""
    module = benchmark.VERSIONS[version]
    batch, before = model.prompts(2, 5), (module.gpt2, module.tqdm.tqdm)
    expected = module.generate(*batch, model.params, model.n_head, 4)
    ids, seconds, _ = model.generate(module, batch, 4)
    assert ids.tolist() == expected.tolist()
    assert len(seconds) == 4 and min(seconds) > 0
    assert (module.gpt2, module.tqdm.tqdm) == before


@pytest.mark.parametrize("B, T", [(1, 10), (3, 10), (3, 1)])
def test_floor(B, T):
    """The products with weights that version 4 computes for one new token, and nothing else."""
    params = params_of_weights()
    gpt2_v4_prealloc.generate(np.zeros((B, T), dtype=np.int64), np.ones((B, T)), params, 4, 1)
    computed = Weight.shapes.copy()
    Weight.shapes.clear()
    floor_seconds = benchmark.load_from_docs("peers").floor_seconds
    floor_seconds(types.SimpleNamespace(params=params, n_embd=32), B * T, B)
    assert Weight.shapes == computed


@pytest.mark.parametrize("wanted", ["", "0", "1", "two", "99999"])
def test_threads(wanted, monkeypatch):
    """At least one, and no more than there are CPUs, since OpenBLAS starts no more."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", wanted)
    threads = runpy.run_path(str(ROOT / "benchmark.py"))["THREADS"]
    assert 1 <= threads <= (1 if wanted == "1" else os.cpu_count())
    assert os.environ["OPENBLAS_NUM_THREADS"] == str(threads)


def test_one_more_position():
    """A time for each repetition, of both ways."""
    concatenate, write = benchmark.seconds_for_one_more(2, 3, 4)
    assert len(concatenate) == len(write) == 4 and min(*concatenate, *write) > 0


def test_a_prompt_as_long_as_the_context(call, tmp_path):
    """There is one new token then, and no decode step to warm up with."""
    options = options_of_a_small_model(tmp_path, n_ctx=16)
    status, stdout, _ = call("cache", *options, "--prompt", "16")
    assert status == 0
    assert [line[:9] for line in stdout.splitlines()[-4:-1]] == [
        "| 1 | v2 ", "| 1 | v3 ", "| 1 | v4 "]
    assert_one_line(call("cache", *options, "--prompt", "17"), "takes 17 tokens here")


def test_a_context_too_short_to_measure(call, tmp_path):
    """16 are enough for cache, after a prompt of 10, but not for steps."""
    options = options_of_a_small_model(tmp_path, n_ctx=16)
    assert call("cache", *options)[0] == 0
    assert_one_line(call("steps", *options), "19 tokens here, more than the model's context of 16")


def test_memory():
    """2 * 12 layers * 1,024 positions * 768 * 4 bytes is 75,497,472, and so on."""
    result = run("benchmark.py", "memory", text=True)
    assert result.returncode == 0 and result.stderr == ""
    assert "| GPT-2 124M | 1 | 75,497,472 | 75,497,472 | 72 |" in result.stdout
    assert "| GPT-2 124M | 8 | 603,979,776 | 603,979,776 | 576 |" in result.stdout
    # KiB a token, then MiB at 128, 512, 1,024, 2,048, 8,192 and 32,768 tokens
    assert "| Qwen3-0.6B | 112 | 14 | 56 | 112 | 224 | 896 | 3,584 |" in result.stdout
    assert "| Llama 3 8B | 128 | 16 | 64 | 128 | 256 | 1,024 |  |" in result.stdout


def test_larger_models(call):
    """What the source texts say of them, in GiB, and the weights in GB."""
    _, stdout, _ = call("memory")
    table = stdout[stdout.index("Larger models in 16 bits"):]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if " | " in line][2:]
    gb, gib, share = ({what: row[n] for _, what, *row in rows} for n in range(3))
    # the book chapter: "3.5 GiB for a 32k-token context, about three times the model's own
    # weights"; so of all that a step reads, the cache is three quarters
    cache, weights = "cache read", "weights read"
    assert gib[cache] == "3.50" and share[cache] == "76%" and share[weights] == "24%"
    assert round(float(gb[cache]) / float(gb[weights])) == 3
    # 596,049,920 parameters (the model's page says 0.6B) of two bytes
    assert benchmark.qwen3_parameters() == 596_049_920 and gb[weights] == "1.19"
    # the lesson: "Eight requests reserved for 8,192 tokens each set aside 8 GiB. If they average
    # 1,000 tokens, about 7 GiB sits empty"
    reserved, filled = "8 x 8,192 positions reserved", "8 x 1,000 positions filled"
    assert gib[reserved] == "8.00" and round(float(gib[reserved]) - float(gib[filled])) == 7
    assert gib[filled] == "0.98" and share[filled] == "12%"


@pytest.mark.parametrize("arguments, says", [
    (["cache", "--model", "124N"], "'124N'"), (["nothing"], "nothing"),
    (["cache", "--model", "124M", "--random", "124M"], "not allowed"),
    (["concat", "--plot"], "steps, memory and beyond"), (["peers", "--runs", "0"], "'0'"),
    (["cache", "--model", str(ROOT / "tests")], "config.json")])
def test_a_mistake_is_one_line(call, arguments, says):
    assert_one_line(call(*arguments), says)


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Stand-ins for all that peers and --plot import: {package: the file that is imported}."""
    files, before = {}, sys.modules.copy()
    for name, imported in (benchmark.PLOT_NEEDS | benchmark.PEERS_NEED).items():
        for module in before:
            if module.split(".")[0] == name:
                del sys.modules[module]
        folder = tmp_path / "packages"
        for part in imported.split("."):
            folder = folder / part
            folder.mkdir(parents=True)
            files[name] = folder / "__init__.py"
            files[name].touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield files
    sys.modules.clear()
    sys.modules.update(before)


@pytest.fixture
def docs(monkeypatch, tmp_path):
    """A folder docs of our own, with what draws."""
    folder = tmp_path / "docs"
    folder.mkdir()
    shutil.copy(benchmark.DOCS / "plots.py", folder)
    monkeypatch.setattr(benchmark, "DOCS", folder)
    return folder


COMMAND_OF = {"matplotlib": ["memory", "--plot"], "torch": ["peers"], "transformers": ["peers"],
              "ctranslate2": ["peers"]}


@pytest.mark.parametrize("package", COMMAND_OF)
def test_a_package_is_missing(call, packages, package):
    sys.modules[package] = None                   # so Python is told that there is none
    assert_one_line(call(*COMMAND_OF[package]), f"-m pip install {package}\n")


def test_all_missing_packages_are_named(call, packages):
    sys.modules.update(dict.fromkeys(packages))
    assert_one_line(call("peers"), "-m pip install torch transformers ctranslate2\n")


@pytest.mark.parametrize("error", [ImportError, OSError])
@pytest.mark.parametrize("package", COMMAND_OF)
def test_a_package_is_broken(call, packages, package, error):
    packages[package].write_text(f"raise {error.__name__}('libx.so:\\nno such file')")
    assert_one_line(call(*COMMAND_OF[package]),
                    f"{package} is installed, but can't be imported: libx.so: no such file")


class Figure:
    """A stand-in for matplotlib's: it takes all that is drawn, and writes a file."""

    def __getattr__(self, name):
        return Figure()

    def __call__(self, *arguments, **options):
        return Figure()

    def subplots(self, *shape):
        return [Figure(), Figure()] if shape else Figure()

    def savefig(self, path, **options):
        path.write_text("a picture")


@pytest.fixture
def figure(packages):
    """matplotlib's Figure, in the place of which ours is."""
    sys.modules["matplotlib.figure"] = types.SimpleNamespace(Figure=lambda **options: Figure())


@pytest.mark.parametrize("command", ["steps", "memory"])
def test_plot(call, docs, figure, command, tmp_path):
    status, stdout, stderr = call(command, "--plot", *options_of_a_small_model(tmp_path, n_ctx=19))
    assert status == 0 and stdout
    assert stderr.endswith(f"wrote {docs / command}.png\n")
    assert (docs / f"{command}.png").read_text() == "a picture"


def test_no_docs(call, docs, figure):
    """Said before anything is measured."""
    (docs / "plots.py").rename(docs / "elsewhere")
    assert_one_line(call("steps", "--plot"), f"'{docs / 'plots.py'}'")
    shutil.rmtree(docs)
    assert_one_line(call("steps", "--plot"), f"{docs}, which is not there")


def test_docs_not_writable(call, docs, figure, monkeypatch):
    """Said before anything is measured; if it is the picture alone, after the table."""
    (docs / "memory.png").mkdir()
    status, stdout, stderr = call("memory", "--plot")
    assert status == 2 and "Larger models" in stdout
    assert stderr.startswith("benchmark.py: error: ") and "memory.png" in stderr
    assert stderr.count("\n") == 1
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    assert_one_line(call("memory", "--plot"), f"{docs}, which is not there, or not writable")


def test_ctrl_c():
    with start("benchmark.py", "cache") as process:
        line = process.stderr.readline()          # it has begun
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"run 0" in line and stdout == b""
    assert all(b" tokens, run " in line for line in stderr.splitlines())


@pytest.mark.parametrize("imported, command", [("tqdm", "memory"), ("torch", "peers")])
def test_ctrl_c_during_an_import(tmp_path, imported, command):
    """Of what the scripts need, or of a package that takes seconds."""
    for name in "torch", "transformers", "ctranslate2":
        (tmp_path / f"{name}.py").touch()
    (tmp_path / f"{imported}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)")
    with start("benchmark.py", command, env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}) as process:
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("argument", ["memory", "--help"])
def test_a_closed_pipe(argument):
    with start("benchmark.py", argument) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("error", [ValueError, ImportError, KeyError])
def test_a_programming_error_keeps_its_traceback(call, monkeypatch, error):
    def fails(options, model):
        raise error("a bug")

    monkeypatch.setitem(benchmark.COMMANDS, "memory", fails)
    with pytest.raises(error, match="a bug"):
        call("memory")


def test_beyond(capsys):
    """On a small model: five tables, whose bytes are those of the formula."""
    model = benchmark.Model("small", random_params(make_hparams(n_ctx=128)), 4)
    options = types.SimpleNamespace(runs=1, plots=None)
    benchmark.load_from_docs("measure_beyond").measure(options, model)
    output = capsys.readouterr().out
    titles = re.findall("^(Sampling|Prompt lookup|A sliding window|8 bits|Eight requests), small",
                        output, re.MULTILINE)
    assert titles == ["Sampling", "Prompt lookup", "A sliding window", "8 bits", "Eight requests"]
    # 2 * 2 layers * 128 positions * 32 values * 4 bytes are 65,536, 1/16 MiB
    assert "| float32 |  | 0.1 |" in output and "| all | 0 | 0.1 |" in output
    # the requests' lengths, an eighth of 7,192 and 2,059 positions, rounded down in each place
    assert re.search(r"\| version 4 \| 0\.4 \| 2\d% \|", output)
    assert int(re.search(r"\| pages \| 0\.\d \| (\d+)% \|", output)[1]) > 60
