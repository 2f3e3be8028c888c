"""Random models, in memory and on disk; the masks that gpt2 of v3 and v4 takes; running scripts."""
import contextlib
import importlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

import benchmark
from encoder import byte_symbols

ROOT = Path(__file__).resolve().parent.parent
# a plain environment: no PYTHONUNBUFFERED, no TQDM_DISABLE
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith(("PYTHON", "TQDM"))}

NUMBER_TYPES = {  # a float32 array -> its bytes in a safetensors file
    "F32": lambda values: values.astype("<f4").tobytes(),
    "F16": lambda values: values.astype("<f2").tobytes(),
    "BF16": lambda values: (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes(),
}


def make_hparams(n_vocab=97, n_ctx=64, n_embd=32, n_head=4, n_layer=2):
    return {"n_vocab": n_vocab, "n_ctx": n_ctx, "n_embd": n_embd, "n_head": n_head,
            "n_layer": n_layer}


def random_params(hparams, seed=0):
    """Large enough for logits that differ widely.

    RandomState, because NumPy promises that its numbers never change.
    """
    random = np.random.RandomState(seed)
    return benchmark.random_params(
        hparams, lambda *shape: (0.2 * random.randn(*shape)).astype(np.float32))


def random_tensors(hparams, seed=0):
    """random_params as a Hugging Face file has them: {name: float32 array}."""
    return benchmark.by_name(random_params(hparams, seed))


def to_params(tensors):
    """The nested params of the scripts, from the parts of the names: "h.0.ln_1.weight" etc."""
    params = {"wte": tensors["wte.weight"], "wpe": tensors["wpe.weight"], "blocks": []}
    for name, tensor in tensors.items():
        *path, kind = name.split(".")
        if path[0] in ("wte", "wpe"):
            continue
        node = params
        if path[0] == "h":
            if int(path[1]) == len(params["blocks"]):
                params["blocks"].append({})
            node, path = params["blocks"][int(path[1])], path[2:]
        for part in path:
            node = node.setdefault(part, {})
        node["b" if kind == "bias" else "g" if "ln_" in name else "w"] = tensor
    return params


def write_safetensors(path, tensors, number_type="F32", prefix="", pad=0):
    """Header length, JSON header, data. pad: more spaces in the header, to misalign the data."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = NUMBER_TYPES[number_type](tensor)
        header[prefix + name] = {"dtype": number_type, "shape": list(tensor.shape),
                                 "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def openai_vocab(merges):
    """Ids in the order of OpenAI's files: 256 bytes, one token for each merge, <|endoftext|>."""
    tokens = [*sorted(byte_symbols().values()), *map("".join, merges), "<|endoftext|>"]
    return {token: n for n, token in enumerate(tokens)}


def write_model(folder, hparams, tensors):
    """A folder in Hugging Face layout, whose tokens are the 256 bytes and <|endoftext|>."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(openai_vocab([])), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "vocab_size": hparams["n_vocab"], "n_positions": hparams["n_ctx"],
        "n_embd": hparams["n_embd"], "n_head": hparams["n_head"], "n_layer": hparams["n_layer"]}))


def write_scripted_model(folder, script):
    """A model that after position p says script[p], a token id, whatever the text.

    Its tokens are unit vectors, its blocks do nothing, and its positions point at the answer.
    """
    hparams = make_hparams(n_vocab=257, n_ctx=len(script), n_embd=257, n_head=1, n_layer=1)
    tensors = {name: np.zeros_like(t) for name, t in random_tensors(hparams).items()}
    tensors["wte.weight"][:] = np.eye(257)
    tensors["wpe.weight"][:] = 100 * np.eye(257)[script]
    tensors["ln_f.weight"][:] = 1
    write_model(folder, hparams, tensors)


def visible(attention_mask, start, stop):
    """The additive mask [B, 1, T, S] of queries start to stop: key <= query, and no padding."""
    query, key = np.arange(start, stop)[:, None], np.arange(stop)
    seen = (key <= query) & (attention_mask[:, None, None, :stop] != 0)
    return np.where(seen, 0, -1e10).astype(np.float32)


def positions(attention_mask):
    """[B, T]: columns counted from each row's first real token; 0 for the padding before it."""
    n_padding = (attention_mask == 0).sum(axis=-1, keepdims=True)
    return np.maximum(np.arange(attention_mask.shape[1]) - n_padding, 0)


def new_caches(module, params, batch, n_head, capacity):
    """Empty caches for gpt2 of v3 or v4."""
    n_layer, n_embd = len(params["blocks"]), params["wte"].shape[1]
    if hasattr(module, "KVCache"):
        return module.KVCache(n_layer, batch, n_head, capacity, n_embd // n_head)
    return [{"k": None, "v": None} for _ in range(n_layer)]


def logits_in_chunks(module, input_ids, attention_mask, params, n_head, sizes):
    """Logits [B, T, V] of v3 or v4, with the columns fed in chunks of sizes, through one cache."""
    B, T = input_ids.shape
    assert sum(sizes) == T
    caches, pos_ids = new_caches(module, params, B, n_head, T), positions(attention_mask)
    logits, start = [], 0
    for size in sizes:
        chunk = slice(start, start + size)
        mask = visible(attention_mask, start, start + size)
        logits.append(module.gpt2(input_ids[:, chunk], pos_ids[:, chunk], mask, caches, **params,
                                  n_head=n_head))
        start += size
    return np.concatenate(logits, axis=1)


def command(script, *arguments):
    return [sys.executable, str(ROOT / script), *arguments]


def run(script, *arguments, env=ENVIRONMENT, **options):
    """Run a script to its end; its stdout and stderr are captured."""
    return subprocess.run(command(script, *arguments), capture_output=True, timeout=60, env=env,
                          **options)


def start(script, *arguments, env=ENVIRONMENT):
    """A process that takes Ctrl-C, which a shell's background jobs do not."""
    return subprocess.Popen(
        command(script, *arguments), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def run_here(script, *arguments):
    """Run a script, or "beyond/NAME.py", in this process: (exit status, stdout, stderr). Quicker."""
    stdout, stderr = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, [str(ROOT / script), *arguments]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()
        status = 0
    except SystemExit as error:
        status = error.code
    finally:
        sys.argv = argv
    return status, stdout.getvalue(), stderr.getvalue()
