"""Downloads, from a Hub on loopback that does wrong whatever can go wrong."""
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tqdm
import urllib3
from urllib3.util import Retry

import hub as hub_module
from conftest import ROOT
from helpers import make_hparams, random_tensors, write_model, write_safetensors
from loopback_hub import Hub
from utils import DownloadError, find_model, load_encoder_hparams_and_params

WEIGHTS = "model.safetensors"
MODEL_FILES = "config.json", "vocab.json", "merges.txt", WEIGHTS
# asked for as well, and answered with a 404
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
            "added_tokens.json", "tokenizer.json", "model.safetensors.index.json")
SCRIPT = str(ROOT / "gpt2_v3_kvcache.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """{file name: bytes} of a small GPT-2."""
    folder = tmp_path_factory.mktemp("model") / "m"
    hparams = make_hparams(n_vocab=257)
    write_model(folder, hparams, random_tensors(hparams))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(model, monkeypatch):
    hub = Hub()
    for repo in *hub_module.REPOS.values(), "some.one/a_model-2":
        hub.files |= {f"{repo}/{name}": content for name, content in model.items()}
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """A power cut is not among the faults that are tried, and waiting for the disk takes long."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(Retry, "get_backoff_time", lambda retry: 0)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(models_dir, model="124M", **environment):
    return subprocess.Popen(
        [sys.executable, SCRIPT, "a", "-n", "1", "--model", model, "--models_dir", models_dir],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def one_line(models_dir, model="124M", **environment):
    """What a run says that can't succeed."""
    with run(models_dir, model, **environment) as process:
        stdout, stderr = process.communicate(timeout=60)
    *bars, line = stderr.decode().splitlines()
    assert process.returncode == 2 and stdout == b""
    assert line.startswith("gpt2_v3_kvcache.py: error: ")
    assert "error" not in "".join(bars) and "Traceback" not in "".join(bars)
    return line


@pytest.mark.parametrize("name, repo", {  # OpenAI's names, and any other on the Hub
    "124M": "openai-community/gpt2", "355M": "openai-community/gpt2-medium",
    "774M": "openai-community/gpt2-large", "1558M": "openai-community/gpt2-xl",
    "117M": "openai-community/gpt2", "345M": "openai-community/gpt2-medium",
    "gpt2": "openai-community/gpt2", "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2", "some.one/a_model-2": "some.one/a_model-2"}.items())
def test_by_name(hub, model, tmp_path, name, repo):
    """A whole model in its folder, from its repository; then never a request again."""
    hub.files = {path: content for path, content in hub.files.items()
                 if path.startswith(f"{repo}/")}
    first = load_encoder_hparams_and_params(name, tmp_path)[2]
    assert contents(tmp_path / name) == model
    n_requests = len(hub.requests)
    second = load_encoder_hparams_and_params(name, tmp_path)[2]
    np.testing.assert_equal(first, second)
    # a redirect for each file, and a 404 for what the repository does not have
    assert len(hub.requests) == n_requests == 2 * len(MODEL_FILES) + len(OPTIONAL)


def test_a_folder_that_is_there_is_not_looked_up(hub, tmp_path, monkeypatch):
    """Whole or not, a path is a path, even one that looks like owner/name."""
    load_encoder_hparams_and_params("some.one/a_model-2", tmp_path)
    hub.requests.clear()
    monkeypatch.chdir(tmp_path)
    assert find_model("some.one/a_model-2", tmp_path / "x") == Path("some.one/a_model-2")
    assert find_model(tmp_path / "some.one" / "a_model-2") == tmp_path / "some.one" / "a_model-2"
    (tmp_path / "some.one" / "a_model-2" / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=f"is incomplete: it has no {WEIGHTS}"):
        load_encoder_hparams_and_params("some.one/a_model-2", tmp_path / "x")
    assert hub.requests == [] and not (tmp_path / "x").exists()


def test_from_the_models_folder_itself(hub, model, tmp_path, monkeypatch):
    """There a half-fetched folder is a path as well, and is completed nevertheless."""
    load_encoder_hparams_and_params("some.one/a_model-2", tmp_path)
    load_encoder_hparams_and_params("124M", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in "some.one/a_model-2", "124M":
        (tmp_path / name / WEIGHTS).unlink()
        load_encoder_hparams_and_params(name, tmp_path)
        assert contents(tmp_path / name) == model


@pytest.mark.parametrize(
    "name", ["gpt3", "a/b/c", "../x", "x/..", "-a/b", "a b/c", "a/b\n", "ä/b"])
def test_what_is_no_name_on_the_hub(hub, tmp_path, name):
    with pytest.raises(FileNotFoundError, match="124M, 355M, 774M, 1558M, .* owner/name"):
        find_model(name, tmp_path)
    assert hub.requests == []


def test_the_token_goes_to_the_endpoint_alone(hub, tmp_path, monkeypatch):
    hub.token = "hf_secret"
    with pytest.raises(DownloadError, match="401.* HF_TOKEN"):
        find_model("124M", tmp_path)
    hub.statuses = {"config.json": [403]}         # for a model whose terms one has to accept
    with pytest.raises(DownloadError, match="403.* HF_TOKEN"):
        find_model("124M", tmp_path)
    hub.requests.clear()
    monkeypatch.setenv("HF_TOKEN", " hf_secret\n")     # as it comes out of a file
    find_model("124M", tmp_path)
    by_storage = [headers["Authorization"] for server, name, headers in hub.requests
                  if server == "storage" and name == WEIGHTS]
    by_front = [headers["Authorization"] for server, name, headers in hub.requests
                if server == "front"]
    assert by_storage == [None] and by_front == ["Bearer hf_secret"] * len(MODEL_FILES + OPTIONAL)


def test_the_token_has_precedence_over_netrc(hub, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token = "hf_secret"
    find_model("124M", tmp_path / "models")
    assert {headers["Authorization"] for server, name, headers in hub.requests
            if name != WEIGHTS} == {"Bearer hf_secret"}


@pytest.mark.parametrize("token", ["hf_not it", "hf_two\nlines", "hf_ünicode"])
def test_a_token_is_never_printed(hub, tmp_path, token):
    hub.token = "hf_secret"
    with run(tmp_path, HF_TOKEN=token) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and b"HF_TOKEN" in stderr and b"hf_" not in stderr


def test_one_bar_for_each_file(hub, model, tmp_path):
    with run(tmp_path) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert stdout.startswith(b"a")
    assert "generating" in stderr.decode()
    for name, content in model.items():
        size = tqdm.tqdm.format_sizeof(len(content))
        assert re.search(rf"{name}: 100%.* {size}/{size} .*B/s", stderr.decode())


def test_a_break_is_mended_at_once(hub, model, tmp_path):
    """From the last byte that came, and for small files, which have no SHA-256, from the first."""
    hub.faults = {WEIGHTS: ["cut", "cut"], "vocab.json": ["cut"], "merges.txt": ["stall"]}
    hub.go_on.set()
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model
    first, second, third = hub.ranges(WEIGHTS)
    size = len(model[WEIGHTS])
    assert first is None
    assert size // 2 - 2**14 <= int(second[6:-1]) < size // 2
    assert size * 3 // 4 - 2**14 <= int(third[6:-1]) < size * 3 // 4
    assert hub.ranges("vocab.json")[-1] is None


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_the_next_run_goes_on(hub, model, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(hub_module, "TIMEOUT", (1, 0.1))
    hub.faults = {WEIGHTS: [fault, "always"]}
    with pytest.raises(DownloadError, match=f"{WEIGHTS} of openai-community/gpt2: .* broke off "
                       rf"after \d+ of {len(model[WEIGHTS])} bytes.* run this again"):
        find_model("124M", tmp_path)
    present = contents(tmp_path / "124M")
    part = present.pop(f"{WEIGHTS}.part")
    assert present == {name: model[name] for name in model if name != WEIGHTS}
    assert len(part) > len(model[WEIGHTS]) / 2 and model[WEIGHTS].startswith(part)
    hub.faults, hub.requests = {}, []
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model
    assert hub.ranges(WEIGHTS) == [f"bytes={len(part) - 1}-"]


@pytest.mark.parametrize("name", [WEIGHTS, "vocab.json"])
@pytest.mark.parametrize("part", [b"", b"x", b"half", b"as long", b"longer"])
@pytest.mark.parametrize("takes_ranges, names_sha256", [
    (True, True), (True, False), (False, True)])
def test_going_on_from_another_file(hub, model, tmp_path, name, part, takes_ranges, names_sha256):
    """What is there is of a file that has changed since, of any length; or it is all there."""
    content = model[name]
    part = {b"half": b"?" * (len(content) // 2), b"as long": b"?" * len(content),
            b"longer": content + b"?"}.get(part, part)
    (tmp_path / "124M").mkdir()
    (tmp_path / "124M" / f"{name}.part").write_bytes(part)
    hub.takes_ranges, hub.names_sha256 = takes_ranges, names_sha256
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model
    if part and not takes_ranges and names_sha256 and name == WEIGHTS:
        assert len(hub.ranges(WEIGHTS)) == 1      # an answer from the beginning is taken as such


def test_killed_between_the_last_byte_and_the_name(hub, model, tmp_path):
    (tmp_path / "124M").mkdir()
    (tmp_path / "124M" / f"{WEIGHTS}.part").write_bytes(model[WEIGHTS])
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model
    assert hub.ranges(WEIGHTS) == [f"bytes={len(model[WEIGHTS]) - 1}-"]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_break_that_no_length_shows(hub, model, tmp_path, name):
    hub.names_sha256 = False                      # a mirror that has no headers of the Hub's
    hub.faults = {name: ["cut chunks"]}
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


def test_damage(hub, model, tmp_path):
    """Wrong bytes, of the right length: fetched anew, and never taken for the file."""
    hub.faults = {WEIGHTS: ["damage", "always"]}
    with pytest.raises(DownloadError, match=f"{WEIGHTS} .* arrived damaged"):
        find_model("124M", tmp_path)
    assert not list((tmp_path / "124M").glob(f"{WEIGHTS}*"))
    hub.faults = {WEIGHTS: ["cut", "damage"]}
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


@pytest.mark.parametrize("status, headers, content, says", [
    (204, {}, b"", "answers 204"),
    (302, {}, b"", "answers 302"),
    (200, {}, b"", "is empty"),
    (200, {"Content-Type": "text/html; charset=utf-8"}, b"<p>Please log in", "a web page"),
    (200, {}, b"<html>Please log in", "is a web page"),
    (200, {}, None, "cut off"),
])
def test_no_file_at_all(hub, model, tmp_path, status, headers, content, says):
    """What has no hash, and is not the file either."""
    hub.names_sha256 = False
    content = model[WEIGHTS][:-9] if content is None else content
    hub.instead = {WEIGHTS: (status, headers, content)}
    with pytest.raises(DownloadError, match=says):
        find_model("124M", tmp_path)
    assert not (tmp_path / "124M" / WEIGHTS).exists()
    hub.instead = {}
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


def test_a_web_page_instead_of_the_rest(hub, model, tmp_path):
    """What is there of the file stays there."""
    (tmp_path / "124M").mkdir()
    (tmp_path / "124M" / f"{WEIGHTS}.part").write_bytes(model[WEIGHTS][:1000])
    hub.instead = {WEIGHTS: (200, {"Content-Type": "text/html"}, b"<p>Please log in")}
    with pytest.raises(DownloadError, match="a web page"):
        find_model("124M", tmp_path)
    hub.instead = {}
    load_encoder_hparams_and_params("124M", tmp_path)
    assert hub.ranges(WEIGHTS) == ["bytes=999-"]


@pytest.mark.parametrize("name", MODEL_FILES[:3])
def test_compressed_content(hub, model, tmp_path, name):
    """It is not asked for, and its Content-Length is not that of the file."""
    hub.instead = {name: (200, {"Content-Encoding": "gzip"}, gzip.compress(model[name]))}
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model
    assert {headers["Accept-Encoding"] for _, _, headers in hub.requests} == {"identity"}


def test_another_size_than_announced(hub, model, tmp_path):
    headers = {"X-Linked-ETag": "none", "X-Linked-Size": len(model[WEIGHTS])}
    hub.instead = {WEIGHTS: (200, headers, model[WEIGHTS] + b"x")}
    with pytest.raises(DownloadError, match="bytes instead of"):
        find_model("124M", tmp_path)


def test_a_busy_hub(hub, model, tmp_path, no_pauses):
    hub.statuses = {"config.json": [503, 503], "vocab.json": [429], WEIGHTS: [500, 502, 504]}
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_stays_busy(hub, model, tmp_path, no_pauses, status):
    hub.statuses = {WEIGHTS: [status, "always"]}
    with pytest.raises(DownloadError, match=f"the Hub answers {status} .* try again later"):
        find_model("124M", tmp_path)
    hub.statuses = {}
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


def test_pauses_between_attempts(hub, tmp_path, monkeypatch):
    """They grow, and don't follow the hour that the Hub asks for."""
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    hub.statuses = {"config.json": [503, "always"]}
    with pytest.raises(DownloadError):
        find_model("124M", tmp_path)
    assert len(pauses) == 4 and pauses == sorted(pauses) and 3 <= pauses[-1] < 60


@pytest.mark.parametrize("name, files, says", [
    ("no.one/nothing", [], "404 for config.json of no.one/nothing.* check the name"),
    ("no.one/pickled", MODEL_FILES[:3], f"404 for {WEIGHTS} of no.one/pickled"),
])
def test_not_on_the_hub(hub, model, tmp_path, name, files, says):
    """Nothing of it stays."""
    hub.files |= {f"{name}/{file}": model[file] for file in files}
    with pytest.raises(DownloadError, match=says):
        find_model(name, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("file, content, says", [
    ("config.json", b'{"model_type": "llama"}', "model_type is 'llama'"),
    ("config.json", b"[1, 2]", "config.json does not hold a JSON object"),
    ("vocab.json", b'{"a": 257}', "'a' has the id 257, .* 257 rows"),
    ("merges.txt", b"a b\n", "needs a token 'ab'"),
])
def test_not_for_us(hub, tmp_path, file, content, says):
    """Seen before the weights are fetched; and when it is mended on the Hub, it works."""
    path = f"openai-community/gpt2/{file}"
    good, hub.files[path] = hub.files[path], content
    with pytest.raises(ValueError, match=says):
        find_model("124M", tmp_path)
    assert hub.ranges(WEIGHTS) == []
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    hub.files[path] = good
    load_encoder_hparams_and_params("124M", tmp_path)


def test_a_file_of_the_users_is_not_removed(hub, tmp_path):
    (tmp_path / "no.one" / "nothing").mkdir(parents=True)
    (tmp_path / "no.one" / "nothing" / WEIGHTS).write_bytes(b"mine")
    with pytest.raises(DownloadError):
        find_model("no.one/nothing", tmp_path)
    assert contents(tmp_path / "no.one" / "nothing") == {WEIGHTS: b"mine"}


def test_no_network(tmp_path):
    """Port 9 of this machine is where nobody answers."""
    line = one_line(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "check the network" in line and "--model tiny needs no network" in line
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://127.0.0.1", "http://", "https:/x"])
def test_no_endpoint(tmp_path, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(DownloadError, match=f"HF_ENDPOINT is '{endpoint}', not an address"):
        find_model("124M", tmp_path)


@pytest.mark.parametrize("endpoint", ["http://[", "http://127.0.0.1:99999", "http://a..b"])
def test_an_endpoint_that_cannot_be(tmp_path, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(DownloadError, match="can't fetch config.json of openai-community/gpt2"):
        find_model("124M", tmp_path)


@pytest.mark.parametrize("name", ["no.one/nothing", "124N"])
def test_one_line(hub, tmp_path, name):
    assert name in one_line(tmp_path, name)


def test_certificates_that_are_not_there(tmp_path):
    line = one_line(tmp_path, HF_ENDPOINT="https://127.0.0.1:9", REQUESTS_CA_BUNDLE="/no/where")
    assert "/no/where" in line and "check the network" in line


def test_a_lock_of_the_users(hub, tmp_path):
    (tmp_path / ".lock").write_text("mine")
    find_model("124M", tmp_path)
    assert (tmp_path / ".lock").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
@pytest.mark.parametrize("name", [WEIGHTS, "vocab.json"])
def test_a_full_disk(hub, model, tmp_path, name):
    (tmp_path / "124M").mkdir()
    (tmp_path / "124M" / f"{name}.part").symlink_to("/dev/full")
    line = one_line(tmp_path)
    assert "No space left on device" in line and str(tmp_path / "124M") in line
    assert not (tmp_path / "124M" / name).exists()
    (tmp_path / "124M" / f"{name}.part").unlink()
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


def test_nowhere_to_write(hub, tmp_path):
    (tmp_path / "file").touch()
    line = one_line(tmp_path / "file" / "models")
    assert str(tmp_path / "file") in line and "--models_dir names another place" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_to_read_only(hub, tmp_path):
    tmp_path.chmod(0o555)
    assert "Permission denied" in one_line(tmp_path)


@pytest.mark.parametrize("name, signal_number", [
    ("config.json", signal.SIGINT), (WEIGHTS, signal.SIGINT), (WEIGHTS, signal.SIGKILL)])
def test_killed_and_run_again(hub, model, tmp_path, name, signal_number):
    hub.faults = {name: ["stall"]}
    part = tmp_path / "124M" / f"{name}.part"
    with run(tmp_path) as process:
        assert hub.stalled.wait(30)
        while name == WEIGHTS and not (part.exists() and part.stat().st_size > 2**15):
            time.sleep(0.01)
        process.send_signal(signal_number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if signal_number == signal.SIGINT else -9)
    assert stdout == b"" and b"Traceback" not in stderr
    assert not (tmp_path / "124M" / name).exists()
    hub.requests.clear()
    with run(tmp_path) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and stdout.startswith(b"a")
    assert contents(tmp_path / "124M") == model
    if name == WEIGHTS:
        assert int(hub.ranges(WEIGHTS)[0][6:-1]) >= 2**15


def test_nobody_reads_the_progress(hub, tmp_path):
    """A closed pipe ends a download as it ends everything: without a word, status 141."""
    with run(tmp_path) as process:
        process.stderr.close()
        assert process.stdout.read() == b""
    assert process.returncode == 141


def test_two_at_once(hub, model, tmp_path):
    """One waits for the other, and says so; each file is fetched once."""
    hub.faults = {WEIGHTS: ["stall"]}
    with run(tmp_path) as first:
        assert hub.stalled.wait(30)
        with run(tmp_path) as second:
            said = second.stderr.readline()
            time.sleep(0.5)                       # in which the second would get on, if it did
            assert second.poll() is None and hub.ranges(WEIGHTS) == [None]
            hub.go_on.set()
            outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert said == b"waiting for another download to end\n"
    assert [first.returncode, second.returncode] == [0, 0]
    assert outputs[0][0] == outputs[1][0] and outputs[0][0].startswith(b"a")
    assert contents(tmp_path / "124M") == model
    for name in MODEL_FILES:
        assert hub.ranges(name)[0] is None and len(hub.ranges(name)) == 1 + (name == WEIGHTS)


def test_when_the_first_is_killed_the_second_takes_over(hub, model, tmp_path):
    hub.faults = {WEIGHTS: ["stall"]}
    with run(tmp_path) as first:
        assert hub.stalled.wait(30)
        with run(tmp_path) as second:
            second.stderr.readline()
            first.kill()
            second.communicate(timeout=60)
    assert second.returncode == 0
    assert contents(tmp_path / "124M") == model


# A model as Transformers saves it today: tokenizer.json, and its weights in three shards.
SHARDED = "some.one/sharded"


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory):
    """The small files are those that Transformers wrote; its shards would be too small to cut."""
    old = ROOT / "tests" / "data" / "folders" / "tokenizer_json"
    new = shutil.copytree(old, tmp_path_factory.mktemp("sharded") / "m",
                          ignore=shutil.ignore_patterns("expected.json", WEIGHTS))
    config = json.loads((new / "config.json").read_text()) | {"n_embd": 32, "n_head": 4}
    (new / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(make_hparams(n_vocab=280, n_ctx=32))
    weight_map = {}
    for n in range(3):
        name = f"model-{n + 1:05}-of-00003.safetensors"
        names = [*tensors][n::3]
        write_safetensors(new / name, {tensor: tensors[tensor] for tensor in names})
        weight_map |= dict.fromkeys(names, name)
    (new / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return new


@pytest.fixture
def sharded(hub, sharded_folder):
    """{file name: bytes}, and the Hub has them."""
    files = contents(sharded_folder)
    hub.files |= {f"{SHARDED}/{name}": content for name, content in files.items()}
    return files


def shards(files):
    return sorted(name for name in files if name.endswith(".safetensors"))


def test_shards(hub, sharded, tmp_path):
    """All that the repository has and we use; then never a request again."""
    hub.token = "hf_secret"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        first = load_encoder_hparams_and_params(SHARDED, tmp_path)[2]
    assert contents(tmp_path / SHARDED) == sharded and len(shards(sharded)) == 3
    assert {headers["Authorization"] for server, name, headers in hub.requests
            if server == "storage" and name in shards(sharded)} == {None}
    assert "vocab.json" not in [name for _, name, _ in hub.requests]
    hub.requests.clear()
    np.testing.assert_equal(load_encoder_hparams_and_params(SHARDED, tmp_path)[2], first)
    assert hub.requests == []


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_the_next_run_goes_on_in_the_shard(hub, sharded, tmp_path, monkeypatch, fault):
    """The shards that are whole already are not fetched again."""
    monkeypatch.setattr(hub_module, "TIMEOUT", (1, 0.1))
    first, second, third = shards(sharded)
    hub.faults = {second: [fault, "always"]}
    with pytest.raises(DownloadError, match=f"{second} of {SHARDED}: .* broke off after"):
        find_model(SHARDED, tmp_path)
    assert (tmp_path / SHARDED / first).read_bytes() == sharded[first]
    part = (tmp_path / SHARDED / f"{second}.part").read_bytes()
    assert sharded[second].startswith(part) and not (tmp_path / SHARDED / second).exists()
    with pytest.raises(FileNotFoundError, match=f"is incomplete: it has no {second}"):
        load_encoder_hparams_and_params(tmp_path / SHARDED)     # by its path, offline
    hub.faults, hub.requests = {}, []
    load_encoder_hparams_and_params(SHARDED, tmp_path)
    assert contents(tmp_path / SHARDED) == sharded
    assert (hub.ranges(first), hub.ranges(third)) == ([], [None])
    assert hub.ranges(second) == [f"bytes={len(part) - 1}-"]


def test_a_damaged_shard(hub, sharded, tmp_path):
    second = shards(sharded)[1]
    hub.faults = {second: ["damage"]}
    load_encoder_hparams_and_params(SHARDED, tmp_path)
    assert contents(tmp_path / SHARDED) == sharded and len(hub.ranges(second)) == 2


def index_with(name):
    """An edit of the index: the last tensor is in a file of this name."""
    def edit(file):
        file["weight_map"][[*file["weight_map"]][-1]] = name
    return edit


@pytest.mark.parametrize("file, edit, says", [
    ("tokenizer.json", lambda file: file.update(normalizer={"type": "NFC"}), "normalizer is"),
    ("tokenizer_config.json", lambda file: file.update(split_special_tokens=True), "split_special"),
    ("generation_config.json", lambda file: file.update(eos_token_id="x"), "eos_token_id is 'x'"),
    ("config.json", lambda file: file.update(add_cross_attention=True), "add_cross_attention"),
    ("model.safetensors.index.json", index_with("../x.safetensors"), "in the same folder"),
    ("model.safetensors.index.json", lambda file: file.clear(), "no weight_map"),
    ("model.safetensors.index.json", index_with("x.safetensors"), "404 for x.safetensors"),
    ("config.json", lambda file: file.update(n_layer=3), "no tensor h.2.ln_1.weight"),
    ("config.json", lambda file: file.update(tie_word_embeddings=False),
     "no tensor lm_head.weight"),
])
def test_a_repository_that_is_refused_leaves_nothing(hub, sharded, tmp_path, file, edit, says):
    """Neither what is wrong with a small file, for which no weights are fetched, nor a shard that
    isn't there, nor weights that are not what config.json says."""
    content = json.loads(sharded[file])
    edit(content)
    hub.files[f"{SHARDED}/{file}"] = json.dumps(content).encode()
    with pytest.raises((ValueError, DownloadError), match=says):
        find_model(SHARDED, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    fetched = any(map(hub.ranges, shards(sharded)))
    assert fetched == says.startswith(("404", "no tensor"))
    hub.files[f"{SHARDED}/{file}"] = sharded[file]
    load_encoder_hparams_and_params(SHARDED, tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors.index.json",
                                  "generation_config.json"])
@pytest.mark.parametrize("status", [403, 500])
def test_an_optional_file_that_is_refused(hub, sharded, tmp_path, no_pauses, name, status):
    """A 404 says that there is none; anything else does not."""
    hub.statuses = {name: [status, "always"]}
    with pytest.raises(DownloadError, match=f"the Hub answers {status} for {name}"):
        find_model(SHARDED, tmp_path)


def test_what_the_version_before_has_left(hub, model, tmp_path):
    """Four files, which are all it fetched, are whole; and if the last is half, it goes on."""
    write_model(tmp_path / "124M", make_hparams(n_vocab=257),
                random_tensors(make_hparams(n_vocab=257)))
    load_encoder_hparams_and_params("124M", tmp_path)
    assert hub.requests == []
    (tmp_path / "124M" / WEIGHTS).rename(tmp_path / "124M" / f"{WEIGHTS}.part")
    load_encoder_hparams_and_params("124M", tmp_path)
    assert contents(tmp_path / "124M") == model
    assert hub.ranges(WEIGHTS) == [f"bytes={len(model[WEIGHTS]) - 1}-"]
    assert hub.ranges("vocab.json") == []


def test_gpt2_is_the_124m_that_is_there(hub, model, tmp_path):
    find_model("124M", tmp_path)
    hub.requests.clear()
    assert find_model("gpt2", tmp_path) == tmp_path / "124M"
    assert hub.requests == []


@pytest.mark.parametrize("value, forbids", [
    ("yes", True), ("on ", True), ("0", False), ("", False), ("false", False)])
def test_offline_values(tmp_path, monkeypatch, no_pauses, value, forbids):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    with pytest.raises(DownloadError) as error:
        find_model("gpt2", tmp_path / "models")
    assert ("HF_HUB_OFFLINE" in str(error.value)) == forbids


@pytest.mark.parametrize("status, stays", [(401, False), (403, False), (404, False), (500, True)])
def test_what_stays_of_a_download(hub, tmp_path, no_pauses, status, stays):
    hub.statuses = {"vocab.json": [status, "always"]}
    with pytest.raises(DownloadError, match=str(status)):
        find_model("some.one/a_model-2", tmp_path)
    assert (tmp_path / "some.one" / "a_model-2" / "config.json").exists() == stays
    assert (tmp_path / "some.one").exists() == stays


def test_files_of_the_users_stay(hub, model, tmp_path):
    """Even those that we would have fetched."""
    (tmp_path / "no.one" / "nothing").mkdir(parents=True)
    (tmp_path / "no.one" / "nothing" / "config.json").write_bytes(model["config.json"])
    with pytest.raises(DownloadError, match="404 for vocab.json"):
        find_model("no.one/nothing", tmp_path)
    assert contents(tmp_path / "no.one" / "nothing") == {"config.json": model["config.json"]}


def test_all_files_of_the_old_layout(hub, tmp_path):
    files = contents(ROOT / "tests" / "data" / "folders" / "old_added_tokens")
    hub.files |= {f"no.one/old/{name}": content for name, content in files.items()}
    find_model("no.one/old", tmp_path)
    files.pop("expected.json")
    assert contents(tmp_path / "no.one" / "old") == files


def test_no_index_is_asked_for_beside_the_weights(hub, model, tmp_path):
    (tmp_path / "124M").mkdir()
    (tmp_path / "124M" / WEIGHTS).write_bytes(model[WEIGHTS])
    find_model("124M", tmp_path)
    assert hub_module.INDEX not in [name for _, name, _ in hub.requests]


@pytest.mark.parametrize("change", ["{}/", " {}\n", "{}//"])
def test_an_endpoint_with_more(hub, model, tmp_path, monkeypatch, change):
    monkeypatch.setenv("HF_ENDPOINT", change.format(hub.endpoint))
    find_model("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


def test_the_endpoint_by_default(monkeypatch):
    for value in "", " ":
        monkeypatch.setenv("HF_ENDPOINT", value)
        urls = []

        class Session:
            def get(self, url, **options):
                urls.append(url)
                raise OSError("no")
        with pytest.raises(DownloadError):
            hub_module.request_file(Session(), "a/b", "c", 0)
        assert urls == ["https://huggingface.co/a/b/resolve/main/c"]


def test_an_ipv6_endpoint(tmp_path, monkeypatch, no_pauses):
    monkeypatch.setenv("HF_ENDPOINT", "http://[::1]:9")
    with pytest.raises(DownloadError, match="can't fetch config.json"):
        find_model("124M", tmp_path)


def test_four_breaks(hub, model, tmp_path):
    hub.faults = {WEIGHTS: ["cut"] * 4}
    find_model("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


@pytest.mark.parametrize("token", ["hf_ünicode", "hf_日本", "hf_two\nlines"])
def test_a_token_that_is_none(hub, tmp_path, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DownloadError, match="HF_TOKEN is not a token"):
        find_model("124M", tmp_path)
    assert hub.requests == []


def test_a_connection_that_fails_at_first(hub, model, tmp_path, monkeypatch, no_pauses):
    connect, failures = urllib3.connection.HTTPConnection._new_conn, [1, 1]

    def new_conn(self):
        if failures:
            failures.pop()
            raise urllib3.exceptions.NewConnectionError(self, "refused")
        return connect(self)
    monkeypatch.setattr(urllib3.connection.HTTPConnection, "_new_conn", new_conn)
    find_model("124M", tmp_path)
    assert contents(tmp_path / "124M") == model


def test_less_than_the_hub_announces(hub, model, tmp_path):
    """What came is kept."""
    size = len(model[WEIGHTS])
    headers = {"X-Linked-ETag": "none", "X-Linked-Size": size}
    hub.instead = {WEIGHTS: (200, headers, model[WEIGHTS][:-9])}
    says = f"broke off after {size - 9} of {size} bytes, which are kept"
    with pytest.raises(DownloadError, match=says):
        find_model("124M", tmp_path)
    assert (tmp_path / "124M" / f"{WEIGHTS}.part").stat().st_size == size - 9


def test_the_length_of_a_part_is_not_the_size():
    class Answer:
        status_code, history = 206, []
        headers = {"X-Linked-ETag": '"' + "0" * 64 + '"', "Content-Length": "5"}

    assert hub_module.announced(Answer()) == (0, "0" * 64)
