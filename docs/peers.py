"""Version 4 beside other engines with the same weights, for benchmark.py peers.

Needs torch, transformers and ctranslate2, which are imported only where they are used.
"""
import importlib.metadata
import json
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np

import benchmark
import gpt2_v3_kvcache
import gpt2_v4_prealloc

N = 32                                            # tokens to generate: a prefill, 31 decode steps
SIZES = (1, 10), (1, 512), (1, 990), (8, 10), (8, 256)  # batch, prompt


def transformers_engine(model):
    """The same weights in Hugging Face Transformers: (its GPT2LMHeadModel, a generate)."""
    import torch
    import transformers

    torch.set_num_threads(benchmark.THREADS)
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=model.n_vocab, n_positions=model.n_ctx, n_embd=model.n_embd,
        n_layer=model.n_layer, n_head=model.n_head,
        eos_token_id=None)                        # no token ends a text, and so none is suppressed
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    arrays = {f"transformer.{name}": array
              for name, array in benchmark.by_name(model.params).items()}
    arrays["lm_head.weight"] = model.params["wte"]
    gpt2.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})

    def generate(batch, n):
        stamps = []
        streamer = types.SimpleNamespace(put=lambda _: stamps.append(time.perf_counter()),
                                         end=lambda: None)
        ids, mask = map(torch.from_numpy, batch)
        start = time.perf_counter()
        with torch.inference_mode():
            output = gpt2.generate(ids, attention_mask=mask, min_new_tokens=n, max_new_tokens=n,
                                   do_sample=False, pad_token_id=0, streamer=streamer)
        return output[:, ids.shape[1]:].numpy(), np.diff([start, *stamps[1:]])  # [0]: the prompt

    return gpt2, generate


def ctranslate2_engine(model, gpt2):
    """The same weights in CTranslate2, which converts a folder of Transformers': a generate."""
    import ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        gpt2.save_pretrained(folder)
        tokens = [f"t{n}" for n in range(model.n_vocab - 1)] + ["<|endoftext|>"]
        Path(folder, "vocab.json").write_text(json.dumps({t: n for n, t in enumerate(tokens)}))
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        ctranslate2.converters.TransformersConverter(folder).convert(f"{folder}/ctranslate2")
        generator = ctranslate2.Generator(f"{folder}/ctranslate2", compute_type="float32",
                                          inter_threads=1, intra_threads=benchmark.THREADS)

    def generate(batch, n):
        stamps = []

        def look_at_the_clock(result):
            if result.batch_id == 0:
                stamps.append(time.perf_counter())

        prompts = [[tokens[token_id] for token_id in row] for row in batch[0]]
        start = time.perf_counter()
        results = generator.generate_batch(
            prompts, min_length=n, max_length=n, end_token=[], include_prompt_in_result=False,
            callback=look_at_the_clock)
        return [result.sequences_ids[0] for result in results], np.diff([start, *stamps])

    return generate


def floor_seconds(model, n_positions, batch):
    """The matrix products of a pass with the weights alone: all linear layers, the unembedding.

    The unembedding is for the last position of a row only.
    """
    x = {n: np.ones((n_positions, n), dtype=np.float32) for n in (model.n_embd, 4 * model.n_embd)}
    weights = [layer["w"] for block in model.params["blocks"]
               for layer in (block["attn"]["c_attn"], block["attn"]["c_proj"],
                             block["mlp"]["c_fc"], block["mlp"]["c_proj"])]
    start = time.perf_counter()
    for w in weights:
        x[len(w)] @ w
    x[model.n_embd][:batch] @ model.params["wte"].T
    return time.perf_counter() - start


def time_engines(engines, model, B, T, n_runs):
    """{engine, and "floor": seconds [n_runs, N]}: what each token took, the first the prefill.

    The program ends here if the engines don't generate the same tokens.
    """
    batch, seconds = model.prompts(B, T), {name: [] for name in [*engines, "floor"]}
    for run in range(n_runs + 1):
        benchmark.progress(f"batch {B}, prompt {T}, run {run} of {n_runs}")
        ids, order = {}, list(engines)            # each run begins with another engine
        for name in order[run % len(order):] + order[:run % len(order)]:
            time.sleep(0.2)                       # threads of the last one wait busily for a moment
            ids[name], times = engines[name](batch, N)
            seconds[name].append(times)
        for name in engines:
            if not np.array_equal(ids[name], ids["v4"]):
                sys.exit(f"{name} generates other tokens than v4: nothing to compare")
        time.sleep(0.2)
        seconds["floor"].append([floor_seconds(model, B * T, B)]
                                + [floor_seconds(model, B, B) for _ in range(1, N)])
    return {name: np.array(times)[1:] for name, times in seconds.items()}  # [0]: a warm-up


def measure(options, model):
    benchmark.progress("converting the weights")
    gpt2, transformers_generate = transformers_engine(model)
    engines = {"v3": lambda batch, n: model.generate(gpt2_v3_kvcache, batch, n)[:2],
               "v4": lambda batch, n: model.generate(gpt2_v4_prealloc, batch, n)[:2],
               "Transformers": transformers_generate,
               "CTranslate2": ctranslate2_engine(model, gpt2)}
    tables = {("Medians", np.median): [], ("Best", np.min): []}
    for B, T in SIZES:
        if T + N - 1 > model.n_ctx:
            continue
        seconds = time_engines(engines, model, B, T, options.runs)
        for phase, tokens in ("prefill", slice(0, 1)), ("decode", slice(1, None)):
            for (_, best), rows in tables.items():
                ms = {name: 1000 * best(times[:, tokens]) for name, times in seconds.items()}
                rows.append([phase, f"{B}", f"{T}", *(f"{value:.1f}" for value in ms.values()),
                             *(f"{ms['v4'] / ms[name]:.2f}" for name in ms if name != "v4")])
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}"
                         for package in ("torch", "transformers", "ctranslate2"))
    for (name, _), rows in tables.items():
        benchmark.print_table(
            f"{name} of {options.runs} runs, {model.name}, float32: milliseconds to the "
            f"first token (prefill) and for each of the next {N - 1} (decode); {versions}",
            ["", "batch", "prompt", *engines, "floor", "v4 : v3", "v4 : Transformers",
             "v4 : CTranslate2", "v4 : floor"], sorted(rows, key=lambda row: row[0]))
