"""Random models, in memory and on disk, and the masks that gpt2 of v3 and v4 takes."""
import json
import struct

import numpy as np

from encoder import byte_symbols

NUMBER_TYPES = {  # a float32 array -> its bytes in a safetensors file
    "F32": lambda values: values.astype("<f4").tobytes(),
    "F16": lambda values: values.astype("<f2").tobytes(),
    "BF16": lambda values: (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes(),
}


def make_hparams(n_vocab=97, n_ctx=64, n_embd=32, n_head=4, n_layer=2):
    return {"n_vocab": n_vocab, "n_ctx": n_ctx, "n_embd": n_embd, "n_head": n_head,
            "n_layer": n_layer}


def random_tensors(hparams, seed=0):
    """{name in a Hugging Face file: float32 array}. Large enough for logits that differ widely.

    RandomState, because NumPy promises that its numbers never change.
    """
    V, C, E = hparams["n_vocab"], hparams["n_ctx"], hparams["n_embd"]
    shapes = {"wte.weight": (V, E), "wpe.weight": (C, E)}
    for layer in range(hparams["n_layer"]):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in {
            "ln_1.weight": (E,), "ln_1.bias": (E,),
            "attn.c_attn.weight": (E, 3 * E), "attn.c_attn.bias": (3 * E,),
            "attn.c_proj.weight": (E, E), "attn.c_proj.bias": (E,),
            "ln_2.weight": (E,), "ln_2.bias": (E,),
            "mlp.c_fc.weight": (E, 4 * E), "mlp.c_fc.bias": (4 * E,),
            "mlp.c_proj.weight": (4 * E, E), "mlp.c_proj.bias": (E,)}.items()}
    shapes |= {"ln_f.weight": (E,), "ln_f.bias": (E,)}
    random = np.random.RandomState(seed)
    tensors = {name: (0.2 * random.randn(*shape)).astype(np.float32)
               for name, shape in shapes.items()}
    return {name: 1 + t if "ln_" in name and "weight" in name else t
            for name, t in tensors.items()}


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


def random_params(hparams, seed=0):
    return to_params(random_tensors(hparams, seed))


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
