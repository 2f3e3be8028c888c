"""The Hugging Face Hub: a model's files from its cache on this machine, or downloaded.

weight_files and missing_file tell, from the folder alone, which files make a model.
"""
import contextlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import tqdm

try:
    import fcntl
except ImportError:                               # on Windows, which has no such locks
    fcntl = None

# names that people use -> where the Hub has those models; it has others, all named owner/name
REPOS = {"124M": "openai-community/gpt2", "355M": "openai-community/gpt2-medium",
         "774M": "openai-community/gpt2-large", "1558M": "openai-community/gpt2-xl",
         "117M": "openai-community/gpt2", "345M": "openai-community/gpt2-medium",
         "gpt2": "openai-community/gpt2", "gpt2-medium": "openai-community/gpt2-medium",
         "gpt2-large": "openai-community/gpt2-large", "gpt2-xl": "openai-community/gpt2-xl",
         "distilgpt2": "distilbert/distilgpt2"}
REPO_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
SHARD_NAME = re.compile(r"\w[\w.-]{0,200}\.safetensors", re.ASCII)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
               "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", INDEX)
TIMEOUT = 10, 30                                  # seconds to wait for a connection, for a byte


class DownloadError(Exception):
    """A model can't be fetched; the message says why, and what to do."""


class NotOnHub(DownloadError):
    """The Hub doesn't have it, or doesn't give it to us."""


class NoSuchFile(NotOnHub):
    """The repository is there, or may be, but not this file."""


def find_model(model, models_dir, *checks):
    """Return the folder of a model, downloaded if need be. FileNotFoundError if there is none.

    model: a name, or the path of a folder; checks are those of fetch_files.
    """
    model, models_dir = str(model), Path(models_dir)
    in_models_dir, as_path = models_dir / model, Path(model)
    for folder in in_models_dir, as_path:
        if is_complete(folder):
            return folder
    if as_path.is_file() or as_path.suffix == ".safetensors":
        raise FileNotFoundError(f"{model} is not a folder: give the one that it is in, "
                                f"{as_path.parent}")
    # what looks like owner/name may be a path: a folder that is there, if only half, is meant
    is_path = as_path.is_dir() and not in_models_dir.is_dir()
    if model in REPOS or (REPO_NAME.fullmatch(model) and not is_path):
        repo = REPOS.get(model, model)
        return (find_here(repo, models_dir)
                or download_model(repo, in_models_dir, models_dir, *checks))
    for folder in in_models_dir, as_path:
        if folder.is_dir():
            return folder
    names = [folder.name for folder in sorted(models_dir.glob("*")) if is_complete(folder)]
    raise FileNotFoundError(
        f"no model {model!r}; {models_dir} has {', '.join(names) or 'none'}; to download, there "
        f"are {', '.join(REPOS)}, and all others on the Hugging Face Hub as owner/name, such "
        f"as {REPOS['124M']}; or give the path of a folder")


def missing_file(folder):
    """Say which file a model's folder lacks, or return None. ValueError for a broken index."""
    names = ["config.json"]
    if not (folder / "tokenizer.json").is_file():
        names += ["vocab.json", "merges.txt"]
    names += weight_files(folder)
    return next((name for name in names if not (folder / name).is_file()), None)


def is_complete(folder):
    """Say whether a folder has all files of a model."""
    try:
        return missing_file(folder) is None
    except (OSError, ValueError):
        return False


def weight_files(folder):
    """Return the names of the files with a model's weights, there or not: one, or its shards."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    return sorted(set(read_index(folder / INDEX).values()))


def read_index(path):
    """Return the weight_map of a model in shards, {tensor: file name}.

    ValueError, with the path, if there is none, or it names what can't be a file beside it.
    """
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map from tensors to files")
    for tensor, name in weight_map.items():
        if not (isinstance(name, str) and SHARD_NAME.fullmatch(name)):
            raise ValueError(f"{path}: {tensor} is said to be in {str(name)[:200]!r}, which is not "
                             f"the name of a .safetensors file in the same folder")
    return weight_map


def check_files(folder):
    """Raise FileNotFoundError or ValueError unless a folder has all files, and plausible ones."""
    missing = missing_file(folder)
    if missing == WEIGHTS and (pickles := sorted(folder.glob("pytorch_model*.bin"))):
        raise FileNotFoundError(
            f"{folder} has its weights in {pickles[0].name} only, a pickle, which can run any code "
            f"when it is read; if you trust it, these two calls of Transformers convert it: model "
            f"= GPT2LMHeadModel.from_pretrained({str(folder)!r}); "
            f"model.save_pretrained({str(folder)!r})")
    if missing:
        instead = " (nor a tokenizer.json)" if missing in ("vocab.json", "merges.txt") else ""
        raise FileNotFoundError(f"{folder} is incomplete: it has no {missing}{instead}")
    for path in sorted(folder.iterdir()):
        if path.name in SMALL_FILES or path.suffix == ".safetensors":
            check_file(path)


def find_here(repo, models_dir):
    """Return the folder that has a repository's model already, or None.

    It may have been downloaded by another of its names, or by another program.
    """
    for name in repo, *(name for name in REPOS if REPOS[name] == repo):
        if is_complete(models_dir / name):
            return models_dir / name
    return find_in_cache(repo)


def find_in_cache(repo):
    """Return the folder of a repository in the Hub's cache on this machine, or None.

    The cache is at $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub. In it,
    models--owner--name/refs/main has the name of a folder in models--owner--name/snapshots.
    Transformers keeps what it knows by a short name, such as gpt2, under that name.
    """
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for name in repo, *(name for name in REPOS if REPOS[name] == repo):
        # suppressed: there is none, or not such a name, or nobody's home that ~ could be
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            in_cache = cache.expanduser() / f"models--{name.replace('/', '--')}"
            revision = (in_cache / "refs" / "main").read_text(encoding="utf-8").strip()
            folder = in_cache / "snapshots" / revision
            if re.fullmatch(r"\w+", revision) and is_complete(folder):
                return folder
    return None


def download_model(repo, folder, models_dir, *checks):
    """Fetch a repository's model into a folder below models_dir; return the folder.

    The Hub is at $HF_ENDPOINT, if that is set; a token in $HF_TOKEN goes to no other host; with
    $HF_HUB_OFFLINE, no request is made. A file gets its name only when it is whole, and the next
    run goes on where this one stops. If the Hub refuses a file, or a check of fetch_files does,
    what this call fetched is deleted. DownloadError or ValueError says why, and what to do.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE"):
        raise DownloadError(f"{repo} is not on this machine, and HF_HUB_OFFLINE forbids to fetch "
                            f"it: unset that, or take --model tiny, which needs no network")
    fetched = []
    try:
        with one_process_at_a_time(models_dir), hub_session() as session:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                fetch_files(session, repo, folder, fetched, *checks)
            except (NotOnHub, ValueError):
                for path in fetched:
                    path.unlink()
                raise
            finally:
                with contextlib.suppress(OSError):    # unless there is something in them
                    folder.rmdir()
                    folder.parent.rmdir()
    except BrokenPipeError:                           # nobody reads the progress any more
        raise
    except OSError as error:
        raise DownloadError(f"can't use {error.filename or folder}: {error.strerror or error}; "
                            f"--models_dir names another place") from None
    return folder


def fetch_files(session, repo, folder, fetched, check_small_files, check_weights, check_model):
    """Fetch what a folder lacks of a model, and append its paths to fetched.

    check_small_files(folder) is called before the weights are fetched, check_weights(path) with
    each file of them, check_model(folder) in the end: ValueError if the model can't be used.
    """
    def fetch(name, optional=False):
        """Fetch a file, if it isn't there; say whether it is there now."""
        if not (folder / name).is_file():
            try:
                download_file(session, repo, folder / name, check_weights)
            except NoSuchFile:
                if optional:
                    return False
                raise
            fetched.append(folder / name)
        return True

    fetch("config.json")
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
                 "added_tokens.json"):
        fetch(name, optional=True)
    if not fetch("tokenizer.json", optional=True):
        fetch("vocab.json")
        fetch("merges.txt")
    if not (folder / WEIGHTS).is_file():
        fetch(INDEX, optional=True)
    check_small_files(folder)
    for name in weight_files(folder):
        fetch(name)
    check_model(folder)


def check_file(path):
    """Raise ValueError if a file is empty, or something else that is found in the place of one."""
    with open(path, "rb") as file:
        start = file.read(100).lstrip().lower()
    if not start:
        raise ValueError(f"{path} is empty: delete it and fetch it again")
    if start.startswith((b"<!doctype html", b"<html")):
        raise ValueError(f"{path} is a web page, not the file itself: delete it and fetch it again")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer; 'git lfs pull' fetches the file itself")


@contextlib.contextmanager
def one_process_at_a_time(models_dir):
    """Wait until no other process downloads into models_dir, and keep others waiting.

    The system drops the lock when the process ends, however it ends; the empty file stays.
    """
    models_dir.mkdir(parents=True, exist_ok=True)
    with open(models_dir / ".lock", "a") as lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another download to end", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def hub_session():
    """Return a requests.Session that sends the token and tries again after passing failures."""
    import requests                               # here: it takes 0.1 s, and few runs need it
    from urllib3.util import Retry

    token = os.environ.get("HF_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise DownloadError("HF_TOKEN is not a token: it has characters that no token has")

    def authorize(request):
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request

    def rebuild_auth(request, response):          # on the way to another host; never from .netrc
        if session.should_strip_auth(response.request.url, request.url):
            request.headers.pop("Authorization", None)

    session = requests.Session()
    session.auth, session.rebuild_auth = authorize, rebuild_auth
    session.headers["Accept-Encoding"] = "identity"  # so that lengths are those of the files
    # Retry-After is not respected, because it may be an hour
    retry = Retry(total=5, connect=2, read=2, backoff_factor=0.5, raise_on_status=False,
                  status_forcelist=[429, 500, 502, 503, 504], respect_retry_after_header=False)
    for scheme in "https://", "http://":
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    return session


def request_file(session, repo, name, start):
    """Ask the Hub for a file, from byte start on; return its answer, a requests.Response."""
    import requests

    endpoint = os.environ.get("HF_ENDPOINT", "").strip() or "https://huggingface.co"
    if not re.match(r"https?://[\w\[]", endpoint):
        raise DownloadError(f"HF_ENDPOINT is {endpoint!r}, not an address such as "
                            f"https://huggingface.co")
    try:
        response = session.get(f"{endpoint.rstrip('/')}/{repo}/resolve/main/{name}", stream=True,
                               headers={"Range": f"bytes={start}-"} if start else {},
                               timeout=TIMEOUT)
    except (OSError, ValueError) as error:            # requests lets some others through
        reason = type(error).__name__ if isinstance(error, requests.RequestException) else error
        raise DownloadError(f"can't fetch {name} of {repo} ({reason}), and there is no such folder "
                            f"here: check the network, the name and HF_ENDPOINT, and run this "
                            f"again; --model tiny needs no network") from None
    status = f"the Hub answers {response.status_code} for {name} of {repo}"
    if response.status_code in (401, 403):
        raise NotOnHub(f"{status}: check the name; a model that isn't public needs a token in "
                       f"HF_TOKEN, and with a wrong one the Hub refuses all")
    if response.status_code == 404:
        raise NoSuchFile(f"{status}, and there is no such folder here: check the name; a model has "
                         f"to be a GPT-2 with config.json, tokenizer.json (or vocab.json and "
                         f"merges.txt) and model.safetensors, not pytorch_model.bin")
    if response.status_code not in (200, 206, 416):
        raise DownloadError(f"{status}: try again later")
    if response.headers.get("Content-Type", "").startswith("text/html"):
        raise DownloadError(f"{status} and sends a web page: a network that wants you to log in?")
    return response


def download_file(session, repo, path, check_weights):
    """Fetch a file by way of path.part, going on from what is in there.

    The Hub answers 206 if it sends the part that we ask for, 200 for the whole file, 416 if there
    is no such part. What has no SHA-256 can't be put together, and begins from the beginning.
    """
    part = path.with_name(f"{path.name}.part")
    problem = "did not come"
    for _ in range(5):
        # our last byte once more: if we have them all, there is no part after it
        start = max(part.stat().st_size - 1, 0) if part.is_file() else 0
        with request_file(session, repo, path.name, start) as response:
            size, sha256 = announced(response)
            if response.status_code == 416 or (start and not sha256):
                part.unlink(missing_ok=True)
                continue
            whole = receive(response, part, start if response.status_code == 206 else 0, size)
        received = part.stat().st_size
        if not whole or received < size:
            problem = f"broke off after {received} of {size or 'unknown'} bytes, which are kept"
            continue
        try:
            check_download(part, size, sha256, check_weights)
        except ValueError as error:
            problem = f"arrived damaged ({error})"
            part.unlink()
        else:
            part.replace(path)
            return
    raise DownloadError(f"can't fetch {path.name} of {repo}: five times it {problem}; run this "
                        f"again")


def announced(response):
    """Return what the Hub says of a file: its size, or 0, and its SHA-256, or None.

    For a large file, the Hub redirects, and the redirect says both: X-Linked-Size, X-Linked-ETag.
    """
    linked = next((answer.headers for answer in (*response.history, response)
                   if "X-Linked-ETag" in answer.headers), {})
    sha256 = re.fullmatch('"?([0-9a-f]{64})"?', linked.get("X-Linked-ETag", ""))
    size = linked.get("X-Linked-Size", "")
    if response.status_code == 200 and "Content-Encoding" not in response.headers:
        size = size or response.headers.get("Content-Length", "")
    return int(size) if size.isdecimal() else 0, sha256 and sha256[1]


def check_download(path, size, sha256, check_weights):
    """Raise ValueError unless a file is what was announced, and can be what it should be."""
    if size and path.stat().st_size != size:
        raise ValueError(f"{path.stat().st_size} bytes instead of {size}")
    if sha256 and sha256 != sha256_of(path):
        raise ValueError("its SHA-256 is wrong")
    check_file(path)
    if path.name.endswith(".safetensors.part"):
        check_weights(path)


def receive(response, path, start, size):
    """Write an answer's bytes into a file, from byte start on; False if the connection breaks."""
    import requests

    with open(path, "r+b" if start else "wb") as file, tqdm.tqdm(
            desc=path.stem, initial=start, total=size or None, unit="B", unit_scale=True) as bar:
        file.seek(start)
        try:
            for block in response.iter_content(2**14):
                file.write(block)
                bar.update(len(block))
        except requests.RequestException:
            return False
        file.flush()
        os.fsync(file.fileno())                       # a power cut must not leave a gap
    return True


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
