"""Measure what each version costs, on the machine this runs on.

    python benchmark.py cache     generating without a cache, with one, with a preallocated one
    python benchmark.py steps     the time of one decode step, by position
    python benchmark.py concat    growing a cache by np.concatenate, or writing into a slice
    python benchmark.py memory    how much a cache takes, reserves, and makes a step read
    python benchmark.py peers     version 4 beside Hugging Face Transformers and CTranslate2

Prints Markdown tables; progress goes to stderr. Times are medians of several runs, after a warm-up.
Let the machine do nothing else meanwhile: threads that wait for each other are very slow. --plot
needs matplotlib; peers needs torch, transformers and ctranslate2.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
import types
from pathlib import Path

# before NumPy starts: its threads are as many as those of the peers
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
wanted = os.environ.get("OPENBLAS_NUM_THREADS", "")
THREADS = min(int(wanted) if wanted.isdecimal() else 0, CPUS) or CPUS
os.environ["OPENBLAS_NUM_THREADS"] = str(THREADS)

import numpy as np  # noqa: E402

import gpt2_v2_padding  # noqa: E402
import gpt2_v3_kvcache  # noqa: E402
import gpt2_v4_prealloc  # noqa: E402
import utils  # noqa: E402
from gpt2_v4_prealloc import KVCache, kv_cache_bytes  # noqa: E402

VERSIONS = {"v2": gpt2_v2_padding, "v3": gpt2_v3_kvcache, "v4": gpt2_v4_prealloc}
# OpenAI's sizes: n_layer, n_head, n_embd
GPT2_SIZES = {"124M": (12, 12, 768), "355M": (24, 16, 1024), "774M": (36, 20, 1280),
              "1558M": (48, 25, 1600)}
MIB = 2**20
CONTEXT_OF = {"Qwen3-0.6B": 32768, "Llama 3 8B": 8192}  # GPT-2's is 1,024
CONTEXTS = 128, 512, 1024, 2048, 8192, 32768
BYTES_PER_TOKEN = {
    f"GPT-2 {name}": kv_cache_bytes(n_layer, 1, 1, n_head, n_embd // n_head)
    for name, (n_layer, n_head, n_embd) in GPT2_SIZES.items()} | {
    # from their config.json: num_hidden_layers, num_key_value_heads, head_dim; 2 bytes a value
    "Qwen3-0.6B": kv_cache_bytes(28, 1, 1, 8, 128, bytes_per_value=2),
    "Llama 3 8B": kv_cache_bytes(32, 1, 1, 8, 128, bytes_per_value=2)}
COLORS = {"v2": "tab:red", "v3": "tab:orange", "v4": "tab:blue"}


def random_params(n_layer, n_embd, n_vocab=50257, n_ctx=1024):
    """Params of normally distributed weights; their values do not matter for the speed.

    They are spread widely enough for logits that differ clearly, so that all engines choose the
    same tokens.
    """
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.05)

    def norm():
        return {"g": 1 + normal(n_embd), "b": normal(n_embd)}

    def linear(n_in, n_out):
        return {"w": normal(n_in, n_out), "b": normal(n_out)}

    def block():
        return {"ln_1": norm(), "attn": {"c_attn": linear(n_embd, 3 * n_embd),
                                         "c_proj": linear(n_embd, n_embd)},
                "ln_2": norm(), "mlp": {"c_fc": linear(n_embd, 4 * n_embd),
                                        "c_proj": linear(4 * n_embd, n_embd)}}

    return {"wte": normal(n_vocab, n_embd), "wpe": normal(n_ctx, n_embd),
            "blocks": [block() for _ in range(n_layer)], "ln_f": norm()}


class Model:
    """The params to measure with, and random prompts for them."""

    def __init__(self, options):
        if options.random:
            n_layer, self.n_head, n_embd = GPT2_SIZES[options.random]
            self.name, self.params = f"random {options.random}", random_params(n_layer, n_embd)
        else:
            _, hparams, self.params = utils.load_encoder_hparams_and_params(
                options.model, options.models_dir)
            self.name, self.n_head = options.model, hparams["n_head"]
        self.n_vocab, self.n_embd = self.params["wte"].shape
        self.n_ctx, self.n_layer = len(self.params["wpe"]), len(self.params["blocks"])

    def prompts(self, batch, T):
        """input_ids [B, T], and an attention_mask of ones."""
        ids = np.random.default_rng(T).integers(0, self.n_vocab - 1, (batch, T))
        return ids, np.ones((batch, T), dtype=np.float32)

    def generate(self, module, batch, n):
        """Run a script's generate. Return the new ids [B, n], the seconds for each of the n, the
        first of them the prefill's, and how many positions went through gpt2.

        For this, the progress bar is replaced by something that looks at the clock.
        """
        stamps, sizes, tqdm, gpt2 = [], [], module.tqdm, module.gpt2

        def look_at_the_clock(steps, *_, **__):
            for step in steps:
                stamps.append(time.perf_counter())
                yield step
            stamps.append(time.perf_counter())

        def counted_gpt2(input_ids, *args, **kwargs):
            sizes.append(input_ids.size)
            return gpt2(input_ids, *args, **kwargs)

        module.tqdm, module.gpt2 = types.SimpleNamespace(tqdm=look_at_the_clock), counted_gpt2
        try:
            start = time.perf_counter()
            ids = module.generate(*batch, self.params, self.n_head, n)
        finally:
            module.tqdm, module.gpt2 = tqdm, gpt2
        return ids, np.diff([start, *stamps[-n:]]), sum(sizes)


def machine():
    """One line: what the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = platform.processor() or platform.machine()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(": ")[2]
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return (f"{cpu}, {os.cpu_count()} cores, {THREADS} threads; Python "
            f"{platform.python_version()}, NumPy {np.__version__}, {blas['name']} "
            f"{blas['version']}")


def print_table(title, header, rows):
    print(f"{title}\n\n{machine()}\n")
    print("|", " | ".join(header), "|")
    print("|", " | ".join("---:" for _ in header), "|")
    for row in rows:
        print("|", " | ".join(row), "|")
    print()


def progress(text):
    print(text, file=sys.stderr)


def cache(options, model):
    rows, batch = [], model.prompts(1, options.prompt)
    for n in sorted({min(n, model.n_ctx - options.prompt + 1) for n in (64, 256, 1000)}):
        seconds, positions = {version: [] for version in VERSIONS}, {}
        for run in range(options.runs + 1):
            for version, module in VERSIONS.items():
                progress(f"{n} new tokens, run {run} of {options.runs}, {version}")
                new = n if run else min(n, 2)     # a short warm-up
                _, times, positions[version] = model.generate(module, batch, new)
                seconds[version].append(times.sum())
        medians = {version: np.median(runs[1:]) for version, runs in seconds.items()}
        rows += [[f"{n}", version, f"{median:.2f}", f"{n / median:.1f}", f"{positions[version]:,}",
                  f"{medians['v2'] / median:.1f}"] for version, median in medians.items()]
    print_table(f"Generating after a prompt of {options.prompt} tokens, {model.name}",
                ["new tokens", "version", "seconds", "tokens/s", "positions", "speed-up"], rows)


def steps(options, model):
    positions = [p for p in (10, 128, 256, 384, 512, 640, 768, 896, 1000) if p + 9 <= model.n_ctx]
    seconds = {(version, T): [] for version in VERSIONS for T in positions}
    for run in range(options.runs + 1):           # a busy moment spoils one run of all, not a point
        for T in positions:
            progress(f"run {run} of {options.runs}, position {T}")
            for version, module in VERSIONS.items():
                _, times, _ = model.generate(module, model.prompts(1, T), 9)
                seconds[version, T].append(times[1:])
    milliseconds = {version: [1000 * np.median(seconds[version, T][1:]) for T in positions]
                    for version in VERSIONS}
    print_table(f"Milliseconds for one decode step, by position, {model.name}",
                ["position", *VERSIONS],
                [[f"{position}"] + [f"{milliseconds[version][n]:.1f}" for version in VERSIONS]
                 for n, position in enumerate(positions)])
    if options.plot:
        figure, axes = options.plot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
        figure.suptitle(model.name)
        for axis, versions in zip(axes, (["v2", "v3", "v4"], ["v3", "v4"])):
            for version in versions:
                axis.plot(positions, milliseconds[version], "o-", color=COLORS[version],
                          label=version)
            axis.set(xlabel="position", ylabel="milliseconds for one decode step", ylim=0)
            axis.legend()
        save(figure, "steps.png")


def concat(options):
    n_head, head_dim, rows = 12, 64, []           # one layer of GPT-2 124M
    # glibc reuses freed memory up to the size of the largest block that it has seen freed; in the
    # model it has seen large ones
    np.empty(31 * MIB, dtype=np.uint8)
    for batch in 1, 8:
        for length in 128, 512, 1024, 2048, 4096, 8192:
            progress(f"batch {batch}, {length} positions")
            cache = KVCache(1, batch, n_head, length, head_dim)
            cache.keys[:] = cache.values[:] = 0
            past = [cache.keys[0, :, :, :-1].copy(), cache.values[0, :, :, :-1].copy()]
            new, grown = np.ones((batch, n_head, 1, head_dim), dtype=np.float32), []

            def grow():
                start = time.perf_counter()
                grown[:] = [np.concatenate([old, new], axis=2) for old in past]
                return time.perf_counter() - start

            def write():
                cache.lengths[0] = length - 1
                start = time.perf_counter()
                cache.update(0, new, new)
                return time.perf_counter() - start

            growing, writing = (1e6 * np.median([run() for _ in range(10 * options.runs + 1)][1:])
                                for run in (grow, write))
            rows.append([f"{batch}", f"{length:,}", f"{growing:,.0f}", f"{writing:,.1f}",
                         f"{sum(range(length)):,}", "0"])
    print_table("Adding one position to the cache of one layer, in microseconds; and the positions "
                "of each row that were copied on the way to this length",
                ["batch", "length", "concatenate", "slice", "copied by concatenate", "by slice"],
                rows)


def memory(options):
    print_allocated()
    print_by_length()
    print_reserved()
    print_traffic()
    if options.plot:
        figure, axis = options.plot.subplots(figsize=(6.4, 4), layout="constrained")
        for name, per_token in BYTES_PER_TOKEN.items():
            lengths = [n for n in CONTEXTS if n <= CONTEXT_OF.get(name, 1024)]
            axis.plot(lengths, [per_token * n / MIB for n in lengths], "o-",
                      label=f"{name}, {'float32' if name.startswith('GPT-2') else '16 bits'}")
        axis.set(xlabel="context, in tokens", ylabel="MiB of cache for one sequence")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.legend()
        save(figure, "memory.png")


def print_allocated():
    rows = []
    for name, batch in ("124M", 1), ("124M", 8), ("355M", 1), ("774M", 1), ("1558M", 1):
        n_layer, n_head, n_embd = GPT2_SIZES[name]
        formula = kv_cache_bytes(n_layer, batch, 1024, n_head, n_embd // n_head)
        allocated = KVCache(n_layer, batch, n_head, 1024, n_embd // n_head).nbytes
        rows.append([f"GPT-2 {name}", f"{batch}", f"{formula:,}", f"{allocated:,}",
                     f"{allocated / MIB:,.0f}"])
    print_table("A cache of 1,024 positions in float32",
                ["model", "batch", "bytes by the formula", "bytes allocated", "MiB"], rows)


def print_by_length():
    rows = [[name, f"{per_token / 1024:,.0f}"]
            + [f"{per_token * n / MIB:,.0f}" if n <= CONTEXT_OF.get(name, 1024) else ""
               for n in CONTEXTS] for name, per_token in BYTES_PER_TOKEN.items()]
    print_table("MiB of cache for one sequence, by its length; GPT-2 in float32, the others in 16 "
                "bits", ["model", "KiB a token", *(f"{n:,}" for n in CONTEXTS)], rows)


def print_reserved():
    # eight requests: the length of the prompt, and of the answer
    requests = [(12, 40), (25, 200), (31, 15), (60, 120), (88, 300), (150, 64), (240, 90),
                (600, 32)]
    capacity = max(T for T, _ in requests) + max(n for _, n in requests) - 1

    def mib(positions):
        return f"{BYTES_PER_TOKEN['GPT-2 124M'] * positions / MIB:.1f}"

    rows = []
    for T, n in requests:
        rows.append([f"{T}", f"{n}", f"{capacity}", f"{T + n - 1}", mib(capacity), mib(T + n - 1),
                     f"{(T + n - 1) / capacity:.0%}"])
    used, reserved = sum(T + n - 1 for T, n in requests), len(requests) * capacity
    rows.append(["all", "", f"{reserved:,}", f"{used:,}", mib(reserved), mib(used),
                 f"{used / reserved:.0%}"])
    print_table("Eight requests in one batch, GPT-2 124M: positions and MiB, reserved and used",
                ["prompt", "answer", "reserved", "used", "MiB reserved", "MiB used", "share used"],
                rows)


def print_traffic():
    n_layer, _, E = GPT2_SIZES["124M"]
    # in each layer, 12 E * E in matrices and 13 E in biases and norms; the tokens; the last norm
    weights = 4 * (n_layer * (12 * E * E + 13 * E) + 50257 * E + 2 * E)
    rows = []
    for batch in 1, 8, 32:
        for length in 128, 512, 1024:
            cached = BYTES_PER_TOKEN["GPT-2 124M"] * batch * length
            rows.append([f"{batch}", f"{length:,}", f"{weights / 1e6:,.0f}",
                         f"{cached / 1e6:,.0f}", f"{cached / (weights + cached):.0%}"])
    print_table("What one decode step reads, in MB, GPT-2 124M",
                ["batch", "context", "weights", "cache", "cache's share"], rows)


def transformers_engine(model):
    """The same weights in Hugging Face Transformers: (its GPT2LMHeadModel, a generate)."""
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=model.n_vocab, n_positions=model.n_ctx, n_embd=model.n_embd,
        n_layer=model.n_layer, n_head=model.n_head,
        eos_token_id=None)                        # no token ends a text, and so none is suppressed
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    gpt2.load_state_dict({name: torch.from_numpy(array)
                          for name, array in hugging_face_names(model.params).items()})

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


def hugging_face_names(params):
    """{the name that GPT2LMHeadModel has for a parameter: the array}"""
    names = {"transformer.wte.weight": params["wte"], "transformer.wpe.weight": params["wpe"],
             "lm_head.weight": params["wte"]}

    def add(name, layer):
        names[f"transformer.{name}.weight"] = layer["w"] if "w" in layer else layer["g"]
        names[f"transformer.{name}.bias"] = layer["b"]

    for n, block in enumerate(params["blocks"]):
        for part in "ln_1", "ln_2":
            add(f"h.{n}.{part}", block[part])
        for part in "attn", "mlp":
            for name, layer in block[part].items():
                add(f"h.{n}.{part}.{name}", layer)
    add("ln_f", params["ln_f"])
    return names


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
                                          inter_threads=1, intra_threads=THREADS)

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


def peers(options, model):
    progress("converting the weights")
    gpt2, transformers_generate = transformers_engine(model)
    engines = {"v3": lambda batch, n: model.generate(gpt2_v3_kvcache, batch, n)[:2],
               "v4": lambda batch, n: model.generate(gpt2_v4_prealloc, batch, n)[:2],
               "Transformers": transformers_generate,
               "CTranslate2": ctranslate2_engine(model, gpt2)}
    n, tables = 32, {"Medians": [], "Best": []}
    for B, T in (1, 10), (1, 512), (1, 990), (8, 10), (8, 256):
        if T + n - 1 > model.n_ctx:
            continue
        batch, seconds = model.prompts(B, T), {name: [] for name in [*engines, "floor"]}
        for run in range(options.runs + 1):
            progress(f"batch {B}, prompt {T}, run {run} of {options.runs}")
            ids, order = {}, list(engines)        # each run begins with another engine
            for name in order[run % len(order):] + order[:run % len(order)]:
                time.sleep(0.2)                   # threads of the last one wait busily for a moment
                ids[name], times = engines[name](batch, n)
                seconds[name].append(times)
            for name in engines:
                if not np.array_equal(ids[name], ids["v4"]):
                    sys.exit(f"{name} generates other tokens than v4: nothing to compare")
            time.sleep(0.2)
            seconds["floor"].append([floor_seconds(model, B * T, B)]
                                    + [floor_seconds(model, B, B) for _ in range(1, n)])
        for phase, tokens in ("prefill", slice(0, 1)), ("decode", slice(1, None)):
            for name, best in ("Medians", np.median), ("Best", np.min):
                ms = {engine: 1000 * best(np.array(times)[1:, tokens])
                      for engine, times in seconds.items()}
                tables[name].append(
                    [phase, f"{B}", f"{T}", *(f"{ms[engine]:.1f}" for engine in seconds)]
                    + [f"{ms['v4'] / ms[engine]:.2f}" for engine in seconds if engine != "v4"])
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}"
                         for package in ("torch", "transformers", "ctranslate2"))
    for name, rows in tables.items():
        print_table(f"{name} of {options.runs} runs, {model.name}, float32: milliseconds to the "
                    f"first token (prefill) and for each of the next {n - 1} (decode); {versions}",
                    ["", "batch", "prompt", *engines, "floor", "v4 : v3", "v4 : Transformers",
                     "v4 : CTranslate2", "v4 : floor"], sorted(rows, key=lambda row: row[0]))


def save(figure, name):
    path = Path(__file__).resolve().parent / "docs" / name
    figure.savefig(path, dpi=120)
    progress(f"wrote {path}")


def main():
    parser = utils.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {command.__name__: command for command in (cache, steps, concat, memory, peers)}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--models_dir", type=Path, default=utils.MODELS_DIR)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--model", default="tiny", help="as for the scripts (default: tiny)")
    measured.add_argument("--random", choices=GPT2_SIZES,
                          help="random weights of this size of GPT-2, instead of a model")
    parser.add_argument("--prompt", type=utils.positive, default=10, metavar="T",
                        help="tokens in the prompt, for cache (default: 10)")
    parser.add_argument("--runs", type=utils.positive, default=3, metavar="N",
                        help="how many runs to take the median of (default: 3)")
    parser.add_argument("--plot", action="store_true",
                        help="draw docs/steps.png or docs/memory.png as well")
    options = parser.parse_args()
    if options.plot and options.command not in ("steps", "memory"):
        parser.error("--plot is for steps and memory")
    needed = {"matplotlib": options.plot} | dict.fromkeys(
        ["torch", "transformers", "ctranslate2"], options.command == "peers")
    missing = [name for name in needed if needed[name] and not importlib.util.find_spec(name)]
    if missing:
        parser.error(f"this needs more packages: {sys.executable} -m pip install "
                     f"{' '.join(missing)}")
    if options.plot:
        options.plot = importlib.import_module("matplotlib.pyplot")
    if options.command in ("concat", "memory"):   # they need no model
        return commands[options.command](options)
    try:
        model = Model(options)
    except (OSError, ValueError, utils.DownloadError) as error:
        parser.error(str(error))
    needed = {"cache": options.prompt, "steps": 10 + 9, "peers": 10 + 31}[options.command]
    if needed > model.n_ctx:
        parser.error(f"{options.command} takes {needed} tokens here, more than the model's context "
                     f"of {model.n_ctx}: choose another --model or, for cache, a shorter --prompt")
    commands[options.command](options, model)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
