"""Models on disk -> (encoder, hparams, params), and the command line that the scripts share."""
import argparse
import contextlib
import io
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np

from encoder import END_OF_TEXT, load_encoder, read_json

MODELS_DIR = Path(__file__).resolve().parent / "models"
MODEL_FILES = ("config.json", "model.safetensors", "vocab.json", "merges.txt")
# OpenAI's names of the sizes, which are ours -> their names in Hugging Face's config.json
SIZES = {"n_vocab": "vocab_size", "n_ctx": "n_positions", "n_embd": "n_embd",
         "n_head": "n_head", "n_layer": "n_layer"}
# settings of config.json that the scripts have built in: their values, first what is assumed
SETTINGS = {"model_type": ["gpt2"], "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
            "layer_norm_epsilon": [1e-5], "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False]}
# safetensors' number types; NumPy has no bfloat16, which is the upper half of a float32
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def load_encoder_hparams_and_params(model="tiny", models_dir=MODELS_DIR):
    """Load a model: a folder in Hugging Face layout, or the name of one in models_dir.

    Returns the Encoder; hparams {"n_vocab", "n_ctx", "n_embd", "n_head", "n_layer"}; and
    params, all of it aligned, C-contiguous float32 (E n_embd, V n_vocab):

        {"wte": [V, E], "wpe": [n_ctx, E], "blocks": [block, ...], "ln_f": {"g": [E], "b": [E]}}

    where a block is {"ln_1", "attn": {"c_attn", "c_proj"}, "ln_2", "mlp": {"c_fc", "c_proj"}},
    and a linear layer {"w": [in, out], "b": [out]}. FileNotFoundError if a file is missing,
    ValueError if it is not what it should be; both say which, and what is wrong.
    """
    folder = find_model(model, models_dir)
    for name in MODEL_FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is incomplete: it has no {name}")
    encoder = load_encoder(folder)
    hparams = load_hparams(folder / "config.json")
    if len(encoder.tokens) != hparams["n_vocab"]:
        raise ValueError(f"{folder}: vocab.json has {len(encoder.tokens)} tokens, config.json "
                         f"says {hparams['n_vocab']}")
    return encoder, hparams, load_params(folder / "model.safetensors", hparams)


def find_model(model, models_dir=MODELS_DIR):
    """Return the folder of a model; FileNotFoundError says which there are."""
    names = sorted(config.parent.name for config in Path(models_dir).glob("*/config.json"))
    if model in names:
        return Path(models_dir) / model
    if Path(model).is_dir():
        return Path(model)
    raise FileNotFoundError(f"no model {str(model)!r}: it is not a folder, and {models_dir} has "
                            f"{', '.join(names) or 'none'}")


def load_hparams(path):
    """Return a model's sizes, from its config.json. ValueError if the scripts can't run it."""
    config = read_json(path)
    for key, values in SETTINGS.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"{path}: {key} is {config[key]!r}, not {values[0]!r}")
    for key in SIZES.values():
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ValueError(f"{path}: {key} is {config.get(key)!r}, not a positive number")
    if config["n_embd"] % config["n_head"]:
        raise ValueError(f"{path}: n_head {config['n_head']} does not divide n_embd "
                         f"{config['n_embd']}")
    return {name: config[key] for name, key in SIZES.items()}


def load_params(path, hparams):
    """Return the params in a safetensors file, as load_encoder_hparams_and_params does.

    The format: 8 bytes, little-endian, with the length of the header; the header, JSON, name ->
    {dtype, shape, data_offsets from the end of the header}; the data. OpenAI's files name their
    tensors "wte.weight", those of Transformers "transformer.wte.weight". What isn't a weight
    (the causal mask, in old files) is not read.
    """
    V, E = hparams["n_vocab"], hparams["n_embd"]
    with open(path, "rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        if header_length > path.stat().st_size - 8:
            raise ValueError(f"{path} is cut off, or not a safetensors file")
        try:
            header = json.loads(file.read(header_length))
        except ValueError as error:
            raise ValueError(f"{path}: its header is not JSON: {error}") from None

        def tensor(name, *shape):
            info = header.get(name) or header.get(f"transformer.{name}")
            if info is None:
                raise ValueError(f"{path}: there is no tensor {name}")
            if info["dtype"] not in DTYPES:
                raise ValueError(f"{path}: {name} is {info['dtype']}, not one of {[*DTYPES]}")
            if tuple(info["shape"]) != shape:
                raise ValueError(f"{path}: {name} is {info['shape']}, not {[*shape]}")
            # reading into an array of its own aligns a tensor, wherever it is in the file
            file.seek(8 + header_length + info["data_offsets"][0])
            values = np.fromfile(file, DTYPES[info["dtype"]], math.prod(shape))
            if values.size != math.prod(shape):
                raise ValueError(f"{path} is cut off: {name} is not whole")
            if info["dtype"] == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            return values.astype(np.float32, copy=False).reshape(shape)

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
        if "lm_head.weight" in header and not np.array_equal(
                tensor("lm_head.weight", V, E), params["wte"]):
            raise ValueError(f"{path}: lm_head.weight differs from wte.weight; in GPT-2 the two "
                             f"are one")
    return params


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def positive(text):
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return number


def make_parser(docstring):
    """The options of all four scripts; the first line of a script's docstring says what it is."""
    parser = Parser(usage="%(prog)s [options] prompt [prompt ...]", allow_abbrev=False,
                    description=docstring.partition("\n")[0])
    parser.add_argument("prompts", nargs="*", metavar="prompt",
                        help="a text to continue, '' to begin with nothing; several make a "
                             "batch, from version 2 on")
    parser.add_argument("-n", "--n_tokens_to_generate", type=positive, default=40, metavar="N",
                        help="how many tokens to add (default: 40)")
    parser.add_argument("--model", default="tiny", metavar="NAME_OR_FOLDER",
                        help="a model in --models_dir, or any folder with a GPT-2 in Hugging Face "
                             "layout (default: tiny)")
    parser.add_argument("--models_dir", type=Path, default=MODELS_DIR, metavar="FOLDER",
                        help="where models are (default: models, beside the scripts)")
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

    If it can't be done, the program ends here: one line on stderr, and exit status 2.
    """

    def __init__(self, docstring, max_prompts):
        parser = make_parser(docstring)
        options = parse_prompts_and_options(parser)
        self.texts, self.n_tokens_to_generate = options.prompts, options.n_tokens_to_generate
        if max_prompts and len(self.texts) > max_prompts:
            parser.error(f"{len(self.texts)} prompts, but this version takes one at a time; "
                         f"gpt2_v2_padding.py runs several as a batch")
        try:
            self.encoder, hparams, self.params = load_encoder_hparams_and_params(
                options.model, options.models_dir)
        except (OSError, ValueError) as error:
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
def command_line(docstring, max_prompts=None):
    """Yield the Job of this command line; Ctrl-C and a closed pipe end it without a word."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a notebook it is something else
        # UTF-8 in any locale; a prompt's bytes that are not UTF-8 go out as they came in
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        try:
            yield Job(docstring, max_prompts)
        finally:
            print(end="", flush=True)             # to notice a closed pipe here, not at exit
    except KeyboardInterrupt:
        sys.exit(130)                             # 128 + SIGINT, as shells say it
    except BrokenPipeError:
        discard_output()
        sys.exit(141)                             # 128 + SIGPIPE
