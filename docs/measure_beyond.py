"""What the five ideas of beyond/ cost and save, for benchmark.py beyond: a table for each."""
import time

import numpy as np

import benchmark
import gpt2_v4_prealloc
from benchmark import MIB, print_table, progress
from beyond import paged, quantized, sampling, sliding_window, speculative
from gpt2_v4_prealloc import KVCache, gpt2, kv_cache_bytes

# eight requests, those of benchmark.py memory: the length of the prompt, and of the answer
REQUESTS = list(zip(benchmark.PROMPTS, benchmark.ANSWERS))
# prompts for a model that knows words; one of random weights gets random tokens
TALE = "Once upon a time there lived a king who had three sons, and they were all very clever. "
REFRAIN = "The mouse ran up the hill, and the cat ran after the mouse. "


def measure(options, model):
    for idea in (measure_sampling, measure_speculative, measure_sliding_window, measure_quantized,
                 measure_paged):
        progress(idea.__name__.replace("_", " "))
        idea(options, model)


def timed(function, *arguments, **named):
    start = time.perf_counter()
    result = function(*arguments, **named)
    return result, time.perf_counter() - start


def new_cache(model, batch, capacity, kind=KVCache, **settings):
    return kind(model.n_layer, batch, model.n_head, capacity, model.n_embd // model.n_head,
                **settings)


def step(model, cache, ids, start):
    """One pass over ids [1, T], at positions from start on: logits [V] of the last one."""
    T = ids.shape[1]
    query, key = np.arange(start, start + T), np.arange(start + T)
    mask = (key > query[:, None]).astype(np.float32) * -1e10     # [T, S], 0 where key <= query
    return gpt2(ids, query[None], mask, cache, **model.params, n_head=model.n_head,
                logits_to_keep=1)[0, -1]


def tale(model, T):
    """A prompt [1, T]."""
    return np.array([model.encoder.encode(TALE)[:T]]) if model.encoder else model.prompts(1, T)[0]


def greedy_logits(model, n):
    """Logits [n, V] of n greedy steps after a prompt of 16."""
    cache, ids, logits = new_cache(model, 1, 15 + n), tale(model, 16), []
    for _ in range(n):
        logits.append(step(model, cache, ids, cache.length))
        ids = np.argmax(logits[-1])[None, None]
    return np.array(logits)


def measure_sampling(_, model):
    logits, rows = greedy_logits(model, 50), []
    for settings in ({"temperature": 0}, {}, {"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.9},
                     {"temperature": 0.7, "top_k": 40, "top_p": 0.9}):
        p, seconds = timed(sampling.probabilities, logits, **settings)
        rows.append([", ".join(f"{name} {value}" for name, value in settings.items()) or "as it is",
                     f"{(p > 0).sum(axis=-1).mean():,.0f}", f"{p.max(axis=-1).mean():.1%}",
                     f"{1000 * seconds / len(p):.2f}"])
    print_table(f"Sampling, {model.name}: means of 50 steps of greedy text",
                ["settings", "tokens that may be drawn", "probability of the greedy one",
                 "ms a token"], rows)


def measure_speculative(options, model):
    """After a prompt that repeats itself, five times the same sentence, and one that does not."""
    refrain = model.encoder.encode(REFRAIN) if model.encoder else model.prompts(1, 20)[0][0]
    texts, rows = {"repeats itself": np.tile(refrain, (1, 5)), "does not": tale(model, 16)}, []
    for name, ids in texts.items():
        batch, n = (ids, np.ones_like(ids)), min(200, model.n_ctx - ids.shape[1] + 1)
        for n_draft in 4, 8, 16:
            plain, fast = [], []
            for _ in range(options.runs):
                expected, seconds = timed(gpt2_v4_prealloc.generate, *batch, model.params,
                                          model.n_head, n)
                plain.append(seconds)
                passes, seconds = timed(lambda: list(speculative.speculate(
                    *batch, model.params, model.n_head, n, n_draft)))
                fast.append(seconds)
                assert [sum(passes, [])] == expected.tolist()
            rows.append([name, f"{n_draft}", f"{len(passes)}", f"{n / len(passes):.2f}",
                         f"{n / np.median(fast):.1f}", f"{n / np.median(plain):.1f}",
                         f"{np.median(plain) / np.median(fast):.2f}"])
    print_table(f"Prompt lookup, {model.name}: {n} new tokens, the same ones as version 4's",
                ["text", "guessed at a time", "passes", "tokens a pass", "tokens/s",
                 "version 4", "faster by"], rows)


def measure_sliding_window(_, model):
    """Bytes and step time at the end of the context, and where greedy text begins to differ."""
    ids, n, rows = tale(model, 16), min(1000, model.n_ctx) - 16 - 10, []
    mask = np.ones_like(ids)
    expected, times, _ = model.generate(gpt2_v4_prealloc, (ids, mask), n)
    for window, n_sinks in [(n + 99, 0), (256, 0), (256, 4), (64, 0), (64, 4), (16, 0), (16, 4)]:
        progress(f"window {window}, {n_sinks} sinks")
        new_ids = sliding_window.generate(ids, mask, model.params, model.n_head, n, window, n_sinks)
        differ = np.flatnonzero(new_ids != expected)
        cache = new_cache(model, 1, min(window, ids.shape[1] + n - 1),
                          sliding_window.SlidingWindowCache, n_sinks=n_sinks)
        seconds = step_seconds(model, cache, ids.shape[1] + n - 10)
        rows.append([f"{window}" if window < n else "all", f"{n_sinks}",
                     f"{cache.nbytes / MIB:.1f}", f"{1000 * seconds:.1f}",
                     f"{differ[0] if len(differ) else n} of {n}"])
    print_table(f"A sliding window, {model.name}: MiB of cache; ms for a decode step at the end of "
                f"the context, where version 4's takes {1000 * np.median(times[-10:]):.1f}; new "
                f"tokens until the first that is not version 4's",
                ["window", "sinks", "MiB", "ms a step", "tokens that stay"], rows)


def step_seconds(model, cache, start):
    """The median time of 10 decode steps after start positions."""
    size = min(256, cache.window)
    for first in range(0, start, size):
        ids = model.prompts(1, min(size, start - first))[0]
        sliding_window.next_tokens(ids, first, cache, model.params, model.n_head)
    return np.median([timed(sliding_window.next_tokens, model.prompts(1, 1)[0], start + n, cache,
                            model.params, model.n_head)[1] for n in range(10)])


QUANTIZED = [("fp8", "position"), ("int8", "position"), ("fp8", "head"), ("int8", "head")]


def measure_quantized(options, model):
    """The same tokens, greedy ones of the float32 cache, through all caches."""
    n = min(1000, model.n_ctx - 16)
    caches = {None: new_cache(model, 1, 16 + n)} | {
        settings: new_cache(model, 1, 16 + n, quantized.QuantizedKVCache, dtype=settings[0],
                            scales=settings[1]) for settings in QUANTIZED}
    ids, seconds = tale(model, 16), {settings: [] for settings in caches}
    errors, stays = ({settings: [] for settings in QUANTIZED} for _ in range(2))
    for start in [0, *range(16, 16 + n)]:
        logits = {}
        for settings, cache in caches.items():
            logits[settings], time_taken = timed(step, model, cache, ids, start)
            seconds[settings].append(time_taken)
        exact = logits.pop(None)
        for settings, other in logits.items():
            errors[settings].append(np.sqrt(np.mean((other - exact) ** 2)) / exact.std())
            stays[settings].append(np.argmax(other) == np.argmax(exact))
        ids = np.argmax(exact)[None, None]
    rows = [["float32", "", f"{caches[None].nbytes / MIB:.1f}", "", "",
             f"{1000 * np.median(seconds[None][1:]):.1f}"]]
    rows += [[dtype, f"a {scales}", f"{caches[dtype, scales].nbytes / MIB:.1f}",
              f"{np.mean(errors[dtype, scales]):.2%}", f"{np.mean(stays[dtype, scales]):.1%}",
              f"{1000 * np.median(seconds[dtype, scales][1:]):.1f}"] for dtype, scales in QUANTIZED]
    print_table(f"8 bits, {model.name}: {n} decode steps on the same tokens; error of the logits, "
                f"root mean square over their spread; share of steps whose greedy token stays",
                ["values", "a scale for", "MiB", "error", "token stays", "ms a step"], rows)
    if options.plots:
        options.plots.draw_errors(model.name, errors)


def measure_paged(options, model):
    """Requests of half these lengths, if the context is half as long, and so on."""
    scale = min(1, model.n_ctx / 1024)
    requests = [(max(int(T * scale), 1), max(int(n * scale), 1)) for T, n in REQUESTS]
    prompts = [model.prompts(1, T)[0][0].tolist() for T, _ in requests]
    ns, one = [n for _, n in requests], kv_cache_bytes(model.n_layer, 1, 1, model.n_head,
                                                       model.n_embd // model.n_head)
    n_tokens, held, taken = sum(ns), [], []

    def look(running, cache):
        held.append(one * sum(request.n_cached for request in running))
        taken.append(one * cache.page_size * (cache.n_pages - len(cache.free)))

    new_ids, seconds = timed(paged.generate, prompts, model.params, model.n_head, ns,
                             after_pass=look)
    batch = gpt2_v4_prealloc.pad_batch(prompts)
    expected, v4_times, _ = model.generate(gpt2_v4_prealloc, batch, max(ns))
    assert all(ids.tolist() == row[:len(ids)].tolist() for ids, row in zip(new_ids, expected))
    reserved = one * len(prompts) * (batch[0].shape[1] + max(ns) - 1)
    used = one * sum(T + n - 1 for T, n in requests)
    pieces = -(-batch[0].shape[1] // 256)
    print_table(f"Eight requests, {model.name}: memory at its peak, and how much of what is "
                f"allocated is used (pages: over all passes)",
                ["", "MiB", "used", "passes", "seconds", "tokens/s"],
                [["version 4", f"{reserved / MIB:.1f}", f"{used / reserved:.0%}",
                  f"{pieces + max(ns) - 1}", f"{v4_times.sum():.2f}",
                  f"{n_tokens / v4_times.sum():.1f}"],
                 ["pages", f"{max(taken) / MIB:.1f}", f"{sum(held) / sum(taken):.0%}",
                  f"{len(held)}", f"{seconds:.2f}", f"{n_tokens / seconds:.1f}"]])
    if options.plots:
        options.plots.draw_requests(model.name, reserved, taken, held)
