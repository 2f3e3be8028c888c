"""Models on disk -> (encoder, hparams, params); their download; the scripts' command line."""
import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import tqdm

try:
    import fcntl
except ImportError:                               # on Windows, which has no such locks
    fcntl = None

from encoder import END_OF_TEXT, load_encoder, read_json

MODELS_DIR = Path(__file__).resolve().parent / "models"
MODEL_FILES = ("config.json", "vocab.json", "merges.txt", "model.safetensors")
# OpenAI's models -> where the Hugging Face Hub has them; it has others, all named owner/name
REPOS = {"124M": "openai-community/gpt2", "355M": "openai-community/gpt2-medium",
         "774M": "openai-community/gpt2-large", "1558M": "openai-community/gpt2-xl"}
REPO_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
TIMEOUT = 10, 30                                  # seconds to wait for a connection, for a byte
# OpenAI's names of the sizes, which are ours -> their names in Hugging Face's config.json
SIZES = {"n_vocab": "vocab_size", "n_ctx": "n_positions", "n_embd": "n_embd",
         "n_head": "n_head", "n_layer": "n_layer"}
# settings that the scripts have built in: the values that fit, first the one that is assumed
SETTINGS = {"model_type": ["gpt2"], "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
            "layer_norm_epsilon": [1e-5], "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False]}
# safetensors' number types; NumPy has no bfloat16, which is the upper half of a float32
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def load_encoder_hparams_and_params(model="tiny", models_dir=MODELS_DIR):
    """Load a model: by its name, or from a folder in Hugging Face layout.

    Names are those of the folders in models_dir; "124M", "355M", "774M" and "1558M", OpenAI's
    GPT-2; and any "owner/name" on the Hugging Face Hub. What models_dir lacks is downloaded into
    it. Returns the Encoder; hparams {"n_vocab", "n_ctx", "n_embd", "n_head", "n_layer"}; and
    params, all of it aligned, C-contiguous float32 (E n_embd, V n_vocab):

        {"wte": [V, E], "wpe": [n_ctx, E], "blocks": [block, ...], "ln_f": {"g": [E], "b": [E]}}

    where a block is {"ln_1", "attn": {"c_attn", "c_proj"}, "ln_2", "mlp": {"c_fc", "c_proj"}},
    and a linear layer {"w": [in, out], "b": [out]}. FileNotFoundError if a file is missing,
    ValueError if it is not what it should be, DownloadError if it can't be fetched; all say
    which file, and what is wrong.
    """
    folder = find_model(model, models_dir)
    for name in MODEL_FILES:
        check_file(folder / name)
    encoder, hparams = load_encoder_and_hparams(folder)
    return encoder, hparams, load_params(folder / "model.safetensors", hparams)


def find_model(model, models_dir=MODELS_DIR):
    """Return the folder of a model, downloaded if need be. FileNotFoundError if there is none."""
    model, models_dir = str(model), Path(models_dir)
    in_models_dir, as_path = models_dir / model, Path(model)
    for folder in in_models_dir, as_path:
        if is_complete(folder):
            return folder
    # what looks like owner/name may be a path: a folder that is there, if only half, is meant
    is_path = as_path.is_dir() and not in_models_dir.is_dir()
    if model in REPOS or (REPO_NAME.fullmatch(model) and not is_path):
        return download_model(model, models_dir)
    for folder in in_models_dir, as_path:
        if folder.is_dir():
            return folder
    names = [folder.name for folder in sorted(models_dir.glob("*")) if is_complete(folder)]
    raise FileNotFoundError(
        f"no model {model!r}; {models_dir} has {', '.join(names) or 'none'}; to download, there "
        f"are {', '.join(REPOS)}, and all others on the Hugging Face Hub as owner/name, such as "
        f"{REPOS['124M']}; or give the path of a folder")


def is_complete(folder):
    return all((folder / name).is_file() for name in MODEL_FILES)


def check_file(path):
    """Raise FileNotFoundError or ValueError unless there is a file, and a plausible one."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is incomplete: it has no {path.name}")
    with open(path, "rb") as file:
        start = file.read(100).lstrip().lower()
    if not start:
        raise ValueError(f"{path} is empty: delete it and fetch it again")
    if start.startswith((b"<!doctype html", b"<html")):
        raise ValueError(f"{path} is a web page, not the file itself: delete it and fetch it again")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer; 'git lfs pull' fetches the file itself")


def load_encoder_and_hparams(folder):
    """Return (encoder, hparams): all but the weights. ValueError if they don't fit each other."""
    encoder, hparams = load_encoder(folder), load_hparams(folder / "config.json")
    if len(encoder.tokens) != hparams["n_vocab"]:
        raise ValueError(f"{folder}: vocab.json has {len(encoder.tokens)} tokens, config.json "
                         f"says {hparams['n_vocab']}")
    return encoder, hparams


def load_hparams(path):
    """Return a model's sizes, from its config.json. ValueError if the scripts can't run it."""
    config = read_json(path)
    for key, values in SETTINGS.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"{path}: {key} is {config[key]!r}; these scripts can run a model "
                             f"only if it is {values[0]!r}")
    for key in SIZES.values():
        if type(config.get(key)) is not int or config[key] < 1:
            raise ValueError(f"{path}: {key} is {config.get(key)!r}, not a positive number")
    if config["n_embd"] % config["n_head"]:
        raise ValueError(f"{path}: n_head {config['n_head']} does not divide n_embd "
                         f"{config['n_embd']}")
    return {name: config[key] for name, key in SIZES.items()}


def read_safetensors_header(file):
    """Return {name: (dtype, shape, start, end)}, start and end being positions in the file.

    The format: 8 bytes, little-endian, with the length of the header; the header, JSON, name ->
    {dtype, shape, data_offsets from the end of the header}; the data, without gaps. ValueError
    if the file is not like this. Source: github.com/huggingface/safetensors.
    """
    size = os.fstat(file.fileno()).st_size
    data_start = 8 + int.from_bytes(file.read(8), "little")
    if data_start > size:
        raise ValueError("not a safetensors file, or cut off in its header; delete it and fetch "
                         "it again")
    try:
        header = json.loads(file.read(data_start - 8))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        try:
            dtype, shape, (start, end) = info["dtype"], info["shape"], info["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its header has no dtype, shape and data_offsets for {name}, but "
                             f"{str(info):.200}") from None
        tensors[name] = str(dtype), tuple(shape), data_start + start, data_start + end
    position = data_start
    for name, (dtype, shape, start, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if start != position or end < start:
            raise ValueError(f"{name} is said to be at bytes {start} to {end}, but the tensor "
                             f"before it ends at {position}")
        position = end
    if position != size:
        raise ValueError(f"it has {size} bytes, but its header says {position}: it is cut off, "
                         "or damaged; delete it and fetch it again")
    return tensors


def load_params(path, hparams):
    """Return the params in a safetensors file, as load_encoder_hparams_and_params does.

    OpenAI's files name their tensors "wte.weight", those of Transformers
    "transformer.wte.weight". The causal masks in old files, attn.bias and attn.masked_bias, are
    not read. ValueError if a tensor is not what hparams asks for, or not finite.
    """
    V, E = hparams["n_vocab"], hparams["n_embd"]
    with open(path, "rb") as file:
        try:
            tensors = read_safetensors_header(file)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        tensors = {name: info for name, info in tensors.items()
                   if not name.endswith((".attn.bias", ".attn.masked_bias"))}

        def tensor(name, *shape):
            info = tensors.pop(name, None) or tensors.pop(f"transformer.{name}", None)
            if info is None:
                raise ValueError(f"{path}: there is no tensor {name}")
            dtype, actual_shape, start, end = info
            if dtype not in DTYPES:
                raise ValueError(f"{path}: {name} is {dtype}, not one of {', '.join(DTYPES)}")
            if actual_shape != shape:
                raise ValueError(f"{path}: {name} is {[*actual_shape]}, not {[*shape]}")
            if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
                raise ValueError(f"{path}: {name} has {end - start} bytes, which is not "
                                 f"{[*shape]} of {dtype}")
            # reading into an array of its own aligns a tensor, wherever it is in the file
            file.seek(start)
            values = np.fromfile(file, DTYPES[dtype], math.prod(shape))
            if dtype == "BF16":
                values = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
            values = values.astype(np.float32, copy=False).reshape(shape)
            if not np.isfinite([values.min(), values.max()]).all():  # a NaN makes both NaN
                raise ValueError(f"{path}: {name} holds NaN or infinity")
            return values

        def norm(name):
            return {"g": tensor(f"{name}.weight", E), "b": tensor(f"{name}.bias", E)}

        def linear(name, n_in, n_out):
            return {"w": tensor(f"{name}.weight", n_in, n_out), "b": tensor(f"{name}.bias", n_out)}

        def block(name):
            return {"ln_1": norm(f"{name}.ln_1"),
                    "attn": {"c_attn": linear(f"{name}.attn.c_attn", E, 3 * E),
                             "c_proj": linear(f"{name}.attn.c_proj", E, E)},
                    "ln_2": norm(f"{name}.ln_2"),
                    "mlp": {"c_fc": linear(f"{name}.mlp.c_fc", E, 4 * E),
                            "c_proj": linear(f"{name}.mlp.c_proj", 4 * E, E)}}

        params = {"wte": tensor("wte.weight", V, E),
                  "wpe": tensor("wpe.weight", hparams["n_ctx"], E),
                  "blocks": [block(f"h.{layer}") for layer in range(hparams["n_layer"])],
                  "ln_f": norm("ln_f")}
        if "lm_head.weight" in tensors and not np.array_equal(
                tensor("lm_head.weight", V, E), params["wte"]):
            raise ValueError(f"{path}: lm_head.weight differs from wte.weight; in GPT-2 the two "
                             f"are one")
    if tensors:
        raise ValueError(f"{path}: {next(iter(tensors))} is not part of a GPT-2 with "
                         f"{hparams['n_layer']} layers")
    return params


class DownloadError(Exception):
    """A model can't be fetched; the message says why, and what to do."""


class NotOnHub(DownloadError):
    """The Hub doesn't have it, or doesn't give it to us."""


def download_model(model, models_dir=MODELS_DIR):
    """Fetch a model from the Hugging Face Hub into models_dir; return its folder.

    model: a key of REPOS, or an owner/name. The Hub is at $HF_ENDPOINT, if that is set; a token in
    $HF_TOKEN goes to no other host. A file gets its name only when it is whole, and the next run
    goes on where this one stops. If the model turns out to be none that we can use, what was
    fetched is deleted. DownloadError, or ValueError for a file's content, says why, and what to
    do.
    """
    models_dir = Path(models_dir)
    repo, folder, fetched = REPOS.get(model, model), models_dir / model, []
    try:
        with one_process_at_a_time(models_dir), hub_session() as session:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                for name in MODEL_FILES:
                    if name == "model.safetensors":   # the big one: see first if the others fit
                        load_encoder_and_hparams(folder)
                    if not (folder / name).is_file():
                        download_file(session, repo, folder / name)
                        fetched.append(folder / name)
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
        raise DownloadError(f"can't use {error.filename or folder}: {error.strerror}; "
                            f"--models_dir names another place") from None
    return folder


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
        raise NotOnHub(f"{status}, and there is no such folder here: check the name; a model has "
                       f"to be a GPT-2 with {', '.join(MODEL_FILES)}")
    if response.status_code not in (200, 206, 416):
        raise DownloadError(f"{status}: try again later")
    if response.headers.get("Content-Type", "").startswith("text/html"):
        raise DownloadError(f"{status} and sends a web page: a network that wants you to log in?")
    return response


def download_file(session, repo, path):
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
            check_download(part, size, sha256)
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


def check_download(path, size, sha256):
    """Raise ValueError unless a file is what was announced, and can be what it should be."""
    if size and path.stat().st_size != size:
        raise ValueError(f"{path.stat().st_size} bytes instead of {size}")
    if sha256 and sha256 != sha256_of(path):
        raise ValueError("its SHA-256 is wrong")
    check_file(path)
    if path.name.startswith("model.safetensors"):
        with open(path, "rb") as file:
            read_safetensors_header(file)


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


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says a mistake in one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def positive(text):
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def make_parser(docstring):
    """The options of all scripts; the first line of a script's docstring says what it is."""
    spec = sys.modules["__main__"].__spec__           # None for a file, not so after python -m
    parser = Parser(prog=f"python -m {spec.name}" if spec else None,
                    usage="%(prog)s [options] prompt [prompt ...]", allow_abbrev=False,
                    description=docstring.partition("\n")[0])
    parser.add_argument("prompts", nargs="*", metavar="prompt",
                        help="a text to continue, '' to begin with nothing; several make a "
                             "batch, from version 2 on")
    parser.add_argument("-n", "--n_tokens_to_generate", type=positive, default=40, metavar="N",
                        help="how many tokens to add (default: 40)")
    parser.add_argument("--model", default="tiny", metavar="NAME_OR_FOLDER",
                        help="tiny, which is there (the default); 124M, 355M, 774M or 1558M, "
                             "OpenAI's GPT-2, or an owner/name, any other on the Hugging Face "
                             "Hub, downloaded on first use; or the path of a folder")
    parser.add_argument("--models_dir", type=Path, default=MODELS_DIR, metavar="FOLDER",
                        help="the folder that holds models, downloads too (default: models, "
                             "beside the scripts)")
    return parser


def parse_prompts_and_options(parser):
    """Parse the command line: options may stand among the prompts, and prompts follow a --."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)  # argparse drops it
    options, unknown = parser.parse_known_intermixed_args(arguments[:end])
    options.prompts += arguments[end + 1:]
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}; put -- before a prompt that begins with -")
    if not options.prompts:
        parser.error("a prompt is missing, such as 'Once upon a time'")
    return options


class Job:
    """What the command line asks for: prompts as lists of token ids, and what to run them on.

    If it can't be done, the program ends here: one line on stderr, and exit status 2; error(line)
    ends it so later on.
    """

    def __init__(self, docstring, max_prompts, add_options):
        parser = make_parser(docstring)
        if add_options:
            add_options(parser)
        self.options = options = parse_prompts_and_options(parser)
        self.error = parser.error
        self.texts, self.n_tokens_to_generate = options.prompts, options.n_tokens_to_generate
        if max_prompts and len(self.texts) > max_prompts:
            parser.error(f"{len(self.texts)} prompts, but this version takes one: put words "
                         f"that belong together in quotes; gpt2_v2_padding.py runs several")
        try:
            self.encoder, hparams, self.params = load_encoder_hparams_and_params(
                options.model, options.models_dir)
        except BrokenPipeError:                       # command_line knows what to do
            raise
        except (OSError, ValueError, DownloadError) as error:
            parser.error(str(error))
        self.n_head, n_ctx = hparams["n_head"], hparams["n_ctx"]
        self.prompts = [self.encoder.encode(text or END_OF_TEXT) for text in self.texts]
        longest = max(map(len, self.prompts))
        room = n_ctx - longest + 1                # the last new token is never fed back
        if self.n_tokens_to_generate > room:
            parser.error(f"{longest} + {self.n_tokens_to_generate} tokens, prompt and new, exceed "
                         f"the model's context of {n_ctx}: shorten the prompt"
                         + (f", or take -n {room}" if room > 0 else ""))
        self.started = time.perf_counter()

    def print(self, new_ids):
        """Print each prompt with its continuation, cut at <|endoftext|>, and say the speed.

        new_ids: [B, n]. The text goes to stdout, the speed to stderr.
        """
        seconds = time.perf_counter() - self.started
        n_tokens = len(self.texts) * self.n_tokens_to_generate
        continued = []
        for text, ids in zip(self.texts, new_ids):
            ids = list(ids)
            if self.encoder.end_of_text in ids:
                ids = ids[:ids.index(self.encoder.end_of_text)]
            continued.append(text + self.encoder.decode(ids))
        print("\n\n".join(continued))
        print(f"{n_tokens} tokens in {seconds:.2f} s, {n_tokens / seconds:.1f} tokens/s",
              file=sys.stderr)


def discard_output():
    """Let Python flush at exit what it could not write, without failing at that again."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in sys.stdout, sys.stderr:
        os.dup2(null, stream.fileno())


@contextlib.contextmanager
def command_line(docstring, max_prompts=None, add_options=None):
    """Yield the Job of this command line; Ctrl-C and a closed pipe end it without a word.

    add_options(parser) adds a script's own options; job.options has what was given.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a notebook it is something else
        # UTF-8 in any locale; a prompt's bytes that are not UTF-8 go out as they came in
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        try:
            yield Job(docstring, max_prompts, add_options)
        finally:
            print(end="", flush=True)             # to notice a closed pipe here, not at exit
    except KeyboardInterrupt:
        sys.exit(130)                             # 128 + SIGINT, as shells say it
    except BrokenPipeError:
        discard_output()
        sys.exit(141)                             # 128 + SIGPIPE
