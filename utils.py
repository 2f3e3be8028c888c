"""Models on disk -> (encoder, hparams, params); the command line that the scripts share."""
import sys

try:                                              # a Ctrl-C needs no traceback: this takes a moment
    import argparse
    import contextlib
    import datetime  # noqa: F401  NumPy makes an ImportError of a Ctrl-C while it imports this
    import io
    import itertools
    import math
    import os
    import re
    import time
    from pathlib import Path

    import numpy as np
    import tqdm

    import hub
    from encoder import is_id, load_encoder, parse_json, read_json
    from hub import DownloadError
except KeyboardInterrupt:
    sys.exit(130)                                 # 128 + SIGINT, as shells say it

MODELS_DIR = Path(__file__).resolve().parent / "models"
# OpenAI's names of the sizes, which are ours -> their names in Hugging Face's config.json
SIZES = {"n_vocab": "vocab_size", "n_ctx": "n_positions", "n_embd": "n_embd",
         "n_head": "n_head", "n_layer": "n_layer"}
# what a config.json says by being silent: Transformers' GPT2Config
DEFAULTS = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
            "n_inner": None, "tie_word_embeddings": True}
# other names that Transformers takes
ALIASES = {"max_position_embeddings": "n_positions", "hidden_size": "n_embd",
           "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
# settings that the scripts have built in: the values that fit, first the one that is assumed
SETTINGS = {"model_type": ["gpt2"], "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
            "layer_norm_epsilon": [1e-5], "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False], "add_cross_attention": [False],
            "is_causal": [True], "sliding_window": [None], "attention_chunk_size": [None],
            "transformers_weights": [None]}
# settings of generation_config.json that make Transformers choose other tokens than the most likely
# ones -> the value, beside None and an empty list, that does not
CHOICES = dict.fromkeys(["num_beams", "repetition_penalty", "encoder_repetition_penalty",
                         "guidance_scale"], 1) | dict.fromkeys(
    ["no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha", "min_length",
     "min_new_tokens"], 0) | dict.fromkeys(
    ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias",
     "forced_bos_token_id", "forced_eos_token_id", "force_words_ids", "constraints",
     "exponential_decay_length_penalty", "watermarking_config", "dola_layers"])
# safetensors' number types; NumPy has no bfloat16, which is the upper half of a float32
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def load_encoder_hparams_and_params(model="tiny", models_dir=MODELS_DIR):
    """Load a model: by its name, or from a folder in Hugging Face layout.

    Names are those of the folders in models_dir; "124M", "355M", "774M" and "1558M" or, as in
    Transformers, "gpt2" etc., OpenAI's GPT-2; and any "owner/name" on the Hugging Face Hub. What
    neither models_dir nor the Hub's cache on this machine has is downloaded into models_dir.
    Returns the Encoder; hparams {"n_vocab", "n_ctx", "n_embd", "n_head", "n_layer"}; and params,
    all of it aligned, C-contiguous float32 (E n_embd, V n_vocab):

        {"wte": [V, E], "wpe": [n_ctx, E], "blocks": [block, ...], "ln_f": {"g": [E], "b": [E]}}

    where a block is {"ln_1", "attn": {"c_attn", "c_proj"}, "ln_2", "mlp": {"c_fc", "c_proj"}},
    and a linear layer {"w": [in, out], "b": [out]}. FileNotFoundError if a file is missing,
    ValueError if it is not what it should be, DownloadError if it can't be fetched; all say
    which file, and what is wrong.
    """
    return load_folder(find_model(model, models_dir))


def find_model(model, models_dir=MODELS_DIR):
    """Return the folder of a model, downloaded if need be. FileNotFoundError if there is none."""
    return hub.find_model(model, models_dir, load_encoder_and_config, read_safetensors_header,
                          load_folder)


def load_folder(folder):
    """Return (encoder, hparams, params), as load_encoder_hparams_and_params does."""
    hub.check_files(folder)
    encoder, config = load_encoder_and_config(folder)
    hparams = {name: config[key] for name, key in SIZES.items()}
    weights = folder / hub.WEIGHTS
    params = load_params(weights if weights.is_file() else folder / hub.INDEX, hparams,
                         config["n_inner"], config["tie_word_embeddings"])
    return encoder, hparams, params


def load_encoder_and_config(folder):
    """Return (encoder, config): all but the weights. ValueError if they don't fit each other."""
    encoder, config = load_encoder(folder), load_config(folder / "config.json")
    n_rows, highest = config["vocab_size"], max(encoder.tokens, default=-1)
    if highest >= n_rows:
        raise ValueError(f"{folder}: the token {encoder.tokens[highest]!r} has the id {highest}, "
                         f"but by config.json's vocab_size the model has {n_rows} rows, from 0 on: "
                         f"are the two of one model?")
    # what is said of generating, first by generation_config.json, then by config.json
    sources = [(path, read_json(path)) for name in ("generation_config.json", "config.json")
               if (path := folder / name).is_file()]
    check_choices(*sources[0])
    begins, ends = (token_ids(sources, key, n_rows) for key in ("bos_token_id", "eos_token_id"))
    encoder.bos_token_id = next(iter(begins), encoder.bos_token_id)
    encoder.eos_token_ids = ends or encoder.eos_token_ids
    return encoder, config


def check_choices(path, settings):
    """ValueError if settings of generating ask for other tokens than the most likely ones."""
    for key, neutral in CHOICES.items():
        if settings.get(key) not in (None, [], {}, neutral):
            raise ValueError(f"{path}: {key} is {settings[key]!r:.200}, which changes what is "
                             f"generated; these scripts can't do that: remove it to go on without")


def token_ids(sources, key, n_vocab):
    """Return the ids that the first source, else the second, has for a key, or [].

    They have a number or a list. Some say 50256, whatever the vocabulary: what is beyond it is
    passed over. ValueError for anything else.
    """
    for path, settings in sources:
        value = settings.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(map(is_id, ids)):
            raise ValueError(f"{path}: {key} is {value!r:.200}, not a token id")
        if ids := [token_id for token_id in ids if token_id < n_vocab]:
            return ids
    return []


def load_config(path):
    """Return what config.json says, silently or not. ValueError if the scripts can't run it."""
    config = read_json(path)
    for alias, key in ALIASES.items():
        if alias in config and config.setdefault(key, config[alias]) != config[alias]:
            raise ValueError(f"{path}: {alias} is {config[alias]!r:.200}, but {key} is "
                             f"{config[key]!r:.200}: make them agree")
    config = DEFAULTS | config
    for key, values in SETTINGS.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"{path}: {key} is {config[key]!r:.200}; these scripts can run a "
                             f"model only if it is {values[0]!r}")
    for key in *SIZES.values(), "n_inner":
        optional = key == "n_inner" and config[key] is None
        if not optional and (type(config[key]) is not int or config[key] < 1):
            raise ValueError(f"{path}: {key} is {config[key]!r:.200}, not a positive number")
    if config["n_embd"] % config["n_head"]:
        raise ValueError(f"{path}: n_head {config['n_head']} does not divide n_embd "
                         f"{config['n_embd']}")
    return config


def read_safetensors_header(path):
    """Return {tensor: (path, dtype, shape, start, end)}, start and end being places in the file.

    The format: 8 bytes, little-endian, with the length of the header; the header, JSON, name ->
    {dtype, shape, data_offsets from the end of the header}; the data, without gaps. ValueError
    if the file is not like this. Source: github.com/huggingface/safetensors.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        data_start = 8 + int.from_bytes(file.read(8), "little")
        if data_start > size:
            raise ValueError(f"{path} is not a safetensors file, or cut off in its header; delete "
                             f"it and fetch it again")
        header = parse_json(f"{path}: its header", file.read(data_start - 8))
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        try:
            dtype, shape, (start, end) = info["dtype"], info["shape"], info["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: its header has no dtype, shape and data_offsets for {name}, "
                             f"but {str(info):.200}") from None
        tensors[name] = path, str(dtype), tuple(shape), data_start + start, data_start + end
    position = data_start
    for name, (*_, start, end) in sorted(tensors.items(), key=lambda item: item[1][3:]):
        if start != position or end < start:
            raise ValueError(f"{path}: {name} is said to be at bytes {start} to {end}, but the "
                             f"tensor before it ends at {position}")
        position = end
    if position != size:
        raise ValueError(f"{path}: it has {size} bytes, but its header says {position}: it is cut "
                         f"off, or damaged; delete it and fetch it again")
    return tensors


def read_headers(path):
    """Return all tensors of a model, as read_safetensors_header does.

    path: a .safetensors file, or the index of several. ValueError if it doesn't fit its shards.
    """
    if path.name != hub.INDEX:
        return read_safetensors_header(path)
    weight_map, tensors = hub.read_index(path), {}
    for name in sorted(set(weight_map.values())):
        for tensor, place in read_safetensors_header(path.with_name(name)).items():
            if tensor in tensors:
                raise ValueError(f"{path.with_name(name)} has {tensor}, and so has "
                                 f"{tensors[tensor][0].name}")
            tensors[tensor] = place
    for tensor, name in weight_map.items():
        if tensor not in tensors or tensors[tensor][0].name != name:
            raise ValueError(f"{path} says that {tensor} is in {name}, which does not have it")
    return tensors


def read_tensor(name, path, dtype, shape, start, end):
    """Return a tensor as float32. ValueError if it can't be, or is not finite."""
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name} is {dtype}, not one of {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{path}: {name} has {end - start} bytes, which is not {[*shape]} of "
                         f"{dtype}")
    # reading into an array of its own aligns a tensor, wherever it is in the file
    values = np.fromfile(path, DTYPES[dtype], math.prod(shape), offset=start)
    if dtype == "BF16":
        values = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
    values = values.astype(np.float32, copy=False).reshape(shape)
    if not np.isfinite([values.min(), values.max()]).all():  # a NaN makes both NaN
        raise ValueError(f"{path}: {name} holds NaN or infinity")
    return values


def load_params(path, hparams, n_inner=None, tied=True):
    """Return the params in a .safetensors file, or in the shards of an index.

    n_inner: the width of the feed-forward network, if it is not 4E. Names are those of GPT2Model,
    "wte.weight", or GPT2LMHeadModel, "transformer.wte.weight". The causal masks in old files,
    attn.bias and attn.masked_bias, are not read. ValueError if a tensor is not what hparams asks
    for, or if the output layer, lm_head, is not wte; tied: without an lm_head, it is.
    """
    V, E = hparams["n_vocab"], hparams["n_embd"]
    F = n_inner or 4 * E
    tensors = {name: place for name, place in read_headers(path).items()
               if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    bar = tqdm.tqdm(desc="reading the weights", unit="B", unit_scale=True, delay=1,
                    total=sum(end - start for *_, start, end in tensors.values()))

    def tensor(name, *shape):
        place = tensors.pop(name, None) or tensors.pop(f"transformer.{name}", None)
        if place is None:
            raise ValueError(f"{path}: there is no tensor {name}")
        if place[2] != shape:
            raise ValueError(f"{place[0]}: {name} is {[*place[2]]}, not {[*shape]}")
        values = read_tensor(name, *place)
        bar.update(place[4] - place[3])
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
                "mlp": {"c_fc": linear(f"{name}.mlp.c_fc", E, F),
                        "c_proj": linear(f"{name}.mlp.c_proj", F, E)}}

    with bar:
        params = {"wte": tensor("wte.weight", V, E),
                  "wpe": tensor("wpe.weight", hparams["n_ctx"], E),
                  "blocks": [block(f"h.{layer}") for layer in range(hparams["n_layer"])],
                  "ln_f": norm("ln_f")}
        if (not tied or "lm_head.weight" in tensors) and not np.array_equal(
                tensor("lm_head.weight", V, E), params["wte"]):
            raise ValueError(f"{path}: lm_head.weight differs from wte.weight; these scripts can "
                             f"run a GPT-2 only if the two are one (tie_word_embeddings)")
    if tensors:
        raise ValueError(f"{path}: {next(iter(tensors))} is not part of a GPT-2 with "
                         f"{hparams['n_layer']} layers")
    return params


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says a mistake in one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def positive(text):
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 1000 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def program():
    """How a script is called: by its file's name, or as python -m beyond.NAME."""
    path = Path(sys.argv[0])
    return f"python -m beyond.{path.stem}" if path.parent.name == "beyond" else path.name


def make_parser(docstring):
    """The options of all scripts; the first line of a script's docstring says what it is."""
    parser = Parser(prog=program(), usage="%(prog)s [options] prompt [prompt ...]",
                    allow_abbrev=False, description=docstring.partition("\n")[0])
    parser.add_argument("prompts", nargs="*", metavar="prompt",
                        help="a text to continue, '' to begin with nothing, - to read one from "
                             "standard input; several make a batch, from version 2 on")
    parser.add_argument("-n", "--n_tokens_to_generate", type=positive, default=40, metavar="N",
                        help="how many tokens to add (default: 40)")
    parser.add_argument("--model", default="tiny", metavar="NAME_OR_FOLDER",
                        help="tiny, which is there (the default); 124M, 355M, 774M or 1558M, "
                             "OpenAI's GPT-2 (or gpt2, gpt2-medium, ...), or an owner/name, any "
                             "other on the Hugging Face Hub, downloaded on first use; or the path "
                             "of a folder")
    parser.add_argument("--models_dir", type=Path, default=MODELS_DIR, metavar="FOLDER",
                        help="the folder that holds models, downloads too (default: models, "
                             "beside the scripts)")
    return parser


def parse_prompts_and_options(parser):
    """Parse the command line: options may stand among the prompts, and prompts follow a --."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)  # argparse drops it
    # argparse would take -hello for -h, and -name for -n ame
    unknown = [argument for argument in arguments[:end]
               if re.match("-h.|-n[^0-9=]", argument, re.DOTALL)]
    if not unknown:
        options, unknown = parser.parse_known_intermixed_args(arguments[:end])
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}; put -- before a prompt that begins with -")
    if options.prompts.count("-") > 1:
        parser.error("standard input, which - stands for, can be read only once")
    options.prompts = [read_stdin(parser) if prompt == "-" else prompt
                       for prompt in options.prompts] + arguments[end + 1:]
    if not options.prompts:
        parser.error("a prompt is missing, such as 'Once upon a time'")
    return options


def read_stdin(parser):
    """Return what standard input has, without its last newline."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")
    except (OSError, AttributeError) as error:    # without a standard input, it is None
        parser.error(f"can't read standard input: {getattr(error, 'strerror', 'it is closed')}")
    return re.sub(r"\r?\n\Z", "", text)


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
            self.prompts = [self.encode(text) for text in self.texts]
        except BrokenPipeError:                       # command_line knows what to do
            raise
        except (OSError, ValueError, DownloadError) as error:
            parser.error(str(error))
        self.n_head, n_ctx = hparams["n_head"], hparams["n_ctx"]
        longest = max(map(len, self.prompts))
        room = n_ctx - longest + 1                # the last new token is never fed back
        if self.n_tokens_to_generate > room:
            parser.error(f"{longest} + {self.n_tokens_to_generate} tokens, prompt and new, exceed "
                         f"the model's context of {n_ctx}: shorten the prompt"
                         + (f", or take -n {room}" if room > 0 else ""))
        self.started = time.perf_counter()

    def encode(self, text):
        """Return the ids of a prompt; an empty one is the token with which texts begin."""
        if text:
            return self.encoder.encode(text)
        if self.encoder.bos_token_id is None:
            raise ValueError("this model has no token with which a text begins: give it a prompt")
        return [self.encoder.bos_token_id]

    def print(self, new_ids):
        """Print each prompt with its continuation, cut at the first end token, and say the speed.

        new_ids: [B, n]. The text goes to stdout, the speed to stderr.
        """
        seconds = time.perf_counter() - self.started
        n_tokens = len(self.texts) * self.n_tokens_to_generate
        ends = self.encoder.eos_token_ids
        with writing():
            print("\n\n".join(
                text + self.encoder.decode(itertools.takewhile(lambda n: n not in ends, ids))
                for text, ids in zip(self.texts, new_ids)), flush=True)
        print(f"{n_tokens} tokens in {seconds:.2f} s, {n_tokens / seconds:.1f} tokens/s",
              file=sys.stderr)


def discard_output():
    """Let Python flush at exit what it could not write, without failing at that again."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in sys.stdout, sys.stderr:
        os.dup2(null, stream.fileno())


@contextlib.contextmanager
def writing():
    """Say in one line, with exit status 1, that standard output can't be written: a full disk."""
    try:
        yield
    except BrokenPipeError:                       # command_line knows what to do
        raise
    except OSError as error:
        print(f"{program()}: error: can't write the text: {error.strerror}", file=sys.stderr)
        discard_output()
        sys.exit(1)


@contextlib.contextmanager
def command_line(docstring, max_prompts=None, add_options=None):
    """Yield the Job of this command line; Ctrl-C and a closed pipe end it without a word.

    add_options(parser) adds a script's own options; job.options has what was given.
    """
    if sys.stderr is None:                        # closed: nobody wants to hear of the progress
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        sys.exit(f"{program()}: error: standard output, for the text, is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a notebook it is something else
        # UTF-8 in any locale; a prompt's bytes that are not UTF-8 go out as they came in
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        try:
            yield Job(docstring, max_prompts, add_options)
        finally:
            with writing():
                print(end="", flush=True)         # to notice a closed pipe here, not at exit
    except KeyboardInterrupt:
        sys.unraisablehook = lambda _: None       # a bar that is only half made can't be closed
        sys.exit(130)                             # 128 + SIGINT, as shells say it
    except BrokenPipeError:
        discard_output()
        sys.exit(141)                             # 128 + SIGPIPE
