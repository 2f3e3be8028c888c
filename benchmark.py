"""Measure what each version costs, on the machine this runs on.

    python benchmark.py cache     generating without a cache, with one, with a preallocated one
    python benchmark.py steps     the time of one decode step, by position
    python benchmark.py concat    growing a cache by np.concatenate, or writing into a slice
    python benchmark.py memory    how much a cache takes, reserves, and makes a step read
    python benchmark.py peers     version 4 beside Hugging Face Transformers and CTranslate2
    python benchmark.py beyond    what the five ideas of beyond/ cost and save

Prints Markdown tables; progress goes to stderr. Times are medians of several runs, after a warm-up.
Let the machine do nothing else meanwhile: threads that wait for each other are very slow. --plot
needs matplotlib; peers needs torch, transformers and ctranslate2.
"""
import sys

try:
    import argparse
    import importlib.util
    import os
    import platform
    import re
    import time
    import timeit
    from pathlib import Path
    from unittest import mock

    # before NumPy starts: its threads are as many as those of the peers
    CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = os.environ.get("OPENBLAS_NUM_THREADS", "")
    THREADS = min(int(wanted) if wanted.isdecimal() else 0, CPUS) or CPUS
    os.environ["OPENBLAS_NUM_THREADS"] = str(THREADS)

    import numpy as np

    import gpt2_v2_padding
    import gpt2_v3_kvcache
    import gpt2_v4_prealloc
    import utils
    from gpt2_v4_prealloc import KVCache, kv_cache_bytes
except KeyboardInterrupt:                         # Ctrl-C as early as that
    sys.exit(130)

DOCS = Path(__file__).resolve().parent / "docs"
VERSIONS = {"v2": gpt2_v2_padding, "v3": gpt2_v3_kvcache, "v4": gpt2_v4_prealloc}
# packages that only --plot and peers need -> what of them is imported
PLOT_NEEDS = {"matplotlib": "matplotlib.figure"}
PEERS_NEED = {"torch": "torch", "transformers": "transformers.models.gpt2.modeling_gpt2",
              "ctranslate2": "ctranslate2"}
GPT2_SIZES = {"124M": (12, 12, 768), "355M": (24, 16, 1024), "774M": (36, 20, 1280),
              "1558M": (48, 25, 1600)}            # OpenAI's: n_layer, n_head, n_embd
PROMPTS, ANSWERS = (12, 25, 31, 60, 88, 150, 240, 600), (40, 200, 15, 120, 300, 64, 90, 32)
MIB = 2**20
CONTEXTS = 128, 512, 1024, 2048, 8192, 32768
CONTEXT_OF = {"Qwen3-0.6B": 32768, "Llama 3 8B": 8192}  # GPT-2's is 1,024
BYTES_PER_TOKEN = {
    f"GPT-2 {size}": kv_cache_bytes(n_layer, 1, 1, n_head, n_embd // n_head)
    for size, (n_layer, n_head, n_embd) in GPT2_SIZES.items()} | {
    # from their config.json: num_hidden_layers, num_key_value_heads, head_dim; 2 bytes a value
    "Qwen3-0.6B": kv_cache_bytes(28, 1, 1, 8, 128, bytes_per_value=2),
    "Llama 3 8B": kv_cache_bytes(32, 1, 1, 8, 128, bytes_per_value=2)}
MIB_BY_LENGTH = {name: {n: per_token * n / MIB for n in CONTEXTS if n <= CONTEXT_OF.get(name, 1024)}
                 for name, per_token in BYTES_PER_TOKEN.items()}


def random_params(hparams, normal=None):
    """Params of random weights, drawn by normal(*shape). Without it, they are spread widely enough
    for logits that differ clearly, so that all engines choose the same tokens.
    """
    random, E = np.random.default_rng(0), hparams["n_embd"]
    normal = normal or (lambda *shape: np.float32(0.05) * random.standard_normal(shape, np.float32))

    def norm():
        return {"g": 1 + normal(E), "b": normal(E)}

    def linear(n_in, n_out):
        return {"w": normal(n_in, n_out), "b": normal(n_out)}

    def block():
        return {"ln_1": norm(), "attn": {"c_attn": linear(E, 3 * E), "c_proj": linear(E, E)},
                "ln_2": norm(), "mlp": {"c_fc": linear(E, 4 * E), "c_proj": linear(4 * E, E)}}

    return {"wte": normal(hparams["n_vocab"], E), "wpe": normal(hparams["n_ctx"], E),
            "blocks": [block() for _ in range(hparams["n_layer"])], "ln_f": norm()}


def by_name(params):
    """{"h.0.ln_1.weight": array, ...}: all parameters, by the names of Hugging Face's files."""
    if isinstance(params, np.ndarray):
        return {"": params}
    names = dict(wte="wte.weight", wpe="wpe.weight", blocks="h", w="weight", g="weight", b="bias")
    items = enumerate(params) if isinstance(params, list) else params.items()
    return {f"{names.get(key, key)}.{name}".strip("."): array
            for key, part in items for name, array in by_name(part).items()}


def noting(function, note):
    """The function, except that note(arguments, result) follows each call of it."""
    def noted(*arguments, **options):
        result = function(*arguments, **options)
        note(arguments, result)
        return result

    return noted


class Model:
    """The params to measure with, and random prompts for them."""

    def __init__(self, name, params, n_head, encoder=None):
        self.name, self.params, self.n_head, self.encoder = name, params, n_head, encoder
        self.n_vocab, self.n_embd = params["wte"].shape
        self.n_ctx, self.n_layer = len(params["wpe"]), len(params["blocks"])

    def prompts(self, batch, T):
        """input_ids [B, T], and an attention_mask of ones."""
        ids = np.random.default_rng(T).integers(0, self.n_vocab - 1, (batch, T))
        return ids, np.ones((batch, T), dtype=np.float32)

    def generate(self, module, batch, n):
        """Run a script's generate. Return the new ids [B, n], the seconds for each of the n, the
        first of them the prefill's, and how many positions went through gpt2.
        """
        stamps, sizes = [], []

        def look_at_the_clock(steps, *_, **__):   # in the place of the progress bar
            for step in steps:
                stamps.append(time.perf_counter())
                yield step
            stamps.append(time.perf_counter())

        counted_gpt2 = noting(module.gpt2, lambda arguments, _: sizes.append(arguments[0].size))
        with mock.patch.object(module, "gpt2", counted_gpt2), \
                mock.patch.object(module.tqdm, "tqdm", look_at_the_clock):
            start = time.perf_counter()
            ids = module.generate(*batch, self.params, self.n_head, n)
        return ids, np.diff([start, *stamps[-n:]]), sum(sizes)


def load_model(options):
    """The Model that --random or --model names."""
    if options.random:
        n_layer, n_head, n_embd = GPT2_SIZES[options.random]
        hparams = {"n_vocab": 50257, "n_ctx": 1024, "n_embd": n_embd, "n_layer": n_layer}
        return Model(f"random {options.random}", random_params(hparams), n_head)
    try:
        encoder, hparams, params = utils.load_encoder_hparams_and_params(
            options.model, options.models_dir)
    except (ValueError, utils.DownloadError) as error:
        fail(error)
    return Model(options.model, params, hparams["n_head"], encoder)


def machine():
    """One line: what the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")               # on Linux
    models = re.findall("model name.*?: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    cpu = models[-1] if models else platform.processor() or platform.machine()
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return (f"{cpu}, {os.cpu_count()} cores, {THREADS} threads; Python "
            f"{platform.python_version()}, NumPy {np.__version__}, {blas['name']} "
            f"{blas['version']}")


def print_table(title, header, rows):
    print(f"{title}\n\n{machine()}\n")
    for row in [header, ["---:"] * len(header), *rows]:
        print("|", " | ".join(row), "|")
    print()


def progress(text):
    print(text, file=sys.stderr)


def fail(message):
    """End the program, because of something that is not its fault."""
    progress(f"benchmark.py: error: {' '.join(str(message).split())}")
    sys.exit(2)


def measure_cache(options, model):
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


def measure_steps(options, model):
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
                [[f"{position}", *(f"{ms:.1f}" for ms in row)]
                 for position, *row in zip(positions, *milliseconds.values())])
    if options.plots:
        options.plots.draw_steps(model.name, positions, milliseconds)


def seconds_for_one_more(batch, length, repeat):
    """What each of repeat times takes to add a position to length - 1 others, in one layer of
    GPT-2 124M: a list for np.concatenate, and one for a KVCache.
    """
    past = np.ones((2, batch, 12, length - 1, 64), dtype=np.float32)  # keys and values
    new, grown = np.ones((batch, 12, 1, 64), dtype=np.float32), []
    cache = KVCache(1, batch, 12, length, 64)
    cache.update(0, *past)

    def concatenate():
        grown[:] = [np.concatenate([old, new], axis=2) for old in past]

    return [timeit.repeat(add, lambda: cache.truncate(length - 1), repeat=repeat, number=1)
            for add in (concatenate, lambda: cache.update(0, new, new))]


def measure_concat(options, _):
    # glibc reuses freed memory up to the size of the largest block that it has seen freed; in the
    # model it has seen large ones
    np.empty(31 * MIB, dtype=np.uint8)
    rows = []
    for batch in 1, 8:
        for length in 128, 512, 1024, 2048, 4096, 8192:
            progress(f"batch {batch}, {length} positions")
            seconds = seconds_for_one_more(batch, length, 10 * options.runs + 1)
            concatenate, write = (1e6 * np.median(times[1:]) for times in seconds)
            rows.append([f"{batch}", f"{length:,}", f"{concatenate:,.0f}", f"{write:,.1f}",
                         f"{sum(range(length)):,}", "0"])
    print_table("Adding one position to the cache of one layer, in microseconds; and the positions "
                "of each row that were copied on the way to this length",
                ["batch", "length", "concatenate", "slice", "copied by concatenate", "by slice"],
                rows)


def measure_memory(options, _):
    print_allocated()
    print_by_length()
    print_reserved()
    print_traffic()
    print_larger_models()
    if options.plots:
        options.plots.draw_memory(MIB_BY_LENGTH)


def print_allocated():
    rows = []
    for size, batch in ("124M", 1), ("124M", 8), ("355M", 1), ("774M", 1), ("1558M", 1):
        n_layer, n_head, n_embd = GPT2_SIZES[size]
        formula = kv_cache_bytes(n_layer, batch, 1024, n_head, n_embd // n_head)
        allocated = KVCache(n_layer, batch, n_head, 1024, n_embd // n_head).nbytes
        rows.append([f"GPT-2 {size}", f"{batch}", f"{formula:,}", f"{allocated:,}",
                     f"{allocated / MIB:,.0f}"])
    print_table("A cache of 1,024 positions in float32",
                ["model", "batch", "bytes by the formula", "bytes allocated", "MiB"], rows)


def print_by_length():
    rows = [[name, f"{BYTES_PER_TOKEN[name] / 1024:,.0f}",
             *(f"{mib[n]:,.0f}" if n in mib else "" for n in CONTEXTS)]
            for name, mib in MIB_BY_LENGTH.items()]
    print_table("MiB of cache for one sequence, by its length; GPT-2 in float32, the others in 16 "
                "bits", ["model", "KiB a token", *(f"{n:,}" for n in CONTEXTS)], rows)


def print_reserved():
    capacity = max(PROMPTS) + max(ANSWERS) - 1    # of each row
    lines = [(T, n, capacity, T + n - 1) for T, n in zip(PROMPTS, ANSWERS)]
    lines += [("all", "", len(lines) * capacity, sum(used for *_, used in lines))]
    mib = BYTES_PER_TOKEN["GPT-2 124M"] / MIB
    print_table("Eight requests in one batch, GPT-2 124M: positions and MiB, reserved and used",
                ["prompt", "answer", "reserved", "used", "MiB reserved", "MiB used", "share used"],
                [[f"{T}", f"{n}", f"{reserved:,}", f"{used:,}", f"{mib * reserved:.1f}",
                  f"{mib * used:.1f}", f"{used / reserved:.0%}"] for T, n, reserved, used in lines])


def print_traffic():
    n_layer, _, E = GPT2_SIZES["124M"]
    # in each layer, 12 E * E in matrices and 13 E in biases and norms; the tokens; the last norm
    weights = 4 * (n_layer * (12 * E * E + 13 * E) + 50257 * E + 2 * E)
    lines = [(batch, length, BYTES_PER_TOKEN["GPT-2 124M"] * batch * length)
             for batch in (1, 8, 32) for length in (128, 512, 1024)]
    print_table("What one decode step reads, in MB, GPT-2 124M",
                ["batch", "context", "weights", "cache", "cache's share"],
                [[f"{batch}", f"{length:,}", f"{weights / 1e6:,.0f}", f"{cache / 1e6:,.0f}",
                  f"{cache / (weights + cache):.0%}"] for batch, length, cache in lines])


def qwen3_parameters():
    """How many Qwen3-0.6B has, by the sizes in its config.json (Qwen/Qwen3-0.6B on the Hub)."""
    V, E, n_layer, n_head, n_kv_head, D, n_inner = 151936, 1024, 28, 16, 8, 128, 3072
    attention = 2 * (n_head + n_kv_head) * D * E + 2 * D  # q and o, k and v; norms of q and of k
    block = attention + 3 * E * n_inner + 2 * E   # gate, up and down; two norms
    return V * E + n_layer * block + E            # the tokens, which unembed too; the last norm


def print_larger_models():
    cache, weights = 32768 * BYTES_PER_TOKEN["Qwen3-0.6B"], 2 * qwen3_parameters()
    reserved, filled = (8 * n * BYTES_PER_TOKEN["Llama 3 8B"] for n in (8192, 1000))
    lines = [("Qwen3-0.6B", "cache read", cache, cache + weights),
             ("Qwen3-0.6B", "weights read", weights, cache + weights),
             ("Llama 3 8B", "8 x 8,192 positions reserved", reserved, reserved),
             ("Llama 3 8B", "8 x 1,000 positions filled", filled, reserved)]
    print_table("Larger models in 16 bits: what one decode step at 32,768 tokens reads; what eight "
                "requests reserve and fill", ["model", "what", "GB", "GiB", "share"],
                [[model, what, f"{part / 1e9:.2f}", f"{part / 2**30:.2f}", f"{part / whole:.0%}"]
                 for model, what, part, whole in lines])


def import_packages(needed):
    """Import packages that requirements.txt doesn't have: {name: what of it}."""
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        fail(f"this needs more packages: {sys.executable} -m pip install {' '.join(missing)}")
    for name, module in needed.items():
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            fail(f"{name} is installed, but can't be imported: {error}")


def load_from_docs(name):
    """A module in docs/, which is no package; OSError if it is not there."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMANDS = {"cache": measure_cache, "steps": measure_steps, "concat": measure_concat,
            "memory": measure_memory,
            "peers": lambda *arguments: load_from_docs("peers").measure(*arguments),
            "beyond": lambda *arguments: load_from_docs("measure_beyond").measure(*arguments)}


def parse_options():
    parser = utils.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
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
                        help="draw docs/steps.png, memory.png, or those of beyond as well")
    options = parser.parse_args()
    if options.plot and options.command not in ("steps", "memory", "beyond"):
        parser.error("--plot is for steps, memory and beyond")
    return options


def measure(options):
    """Run the command that the command line asks for."""
    if options.plot and not os.access(DOCS, os.W_OK):
        fail(f"--plot draws into {DOCS}, which is not there, or not writable")
    import_packages(PLOT_NEEDS if options.plot else {})
    import_packages(PEERS_NEED if options.command == "peers" else {})
    options.plots = load_from_docs("plots") if options.plot else None
    positions = {"cache": options.prompt, "steps": 10 + 9, "peers": 10 + 31,
                 "beyond": 512}.get(options.command)
    model = load_model(options) if positions else None
    if model and positions > model.n_ctx:
        fail(f"{options.command} takes {positions} tokens here, more than the model's context of "
             f"{model.n_ctx}: choose another --model or, for cache, a shorter --prompt")
    COMMANDS[options.command](options, model)


def main():
    try:
        try:
            measure(parse_options())
        finally:
            print(end="", flush=True)             # to notice a closed pipe here, not at exit
    except KeyboardInterrupt:
        sys.exit(130)                             # 128 + SIGINT, as shells say it
    except BrokenPipeError:
        utils.discard_output()
        sys.exit(141)                             # 128 + SIGPIPE
    except OSError as error:
        fail(error)


if __name__ == "__main__":
    main()
