"""Beyond version 4: sampling, so that texts differ and don't run in circles.

Greedy decoding takes the most likely token at each step, and often falls into a loop. Sampling
draws a token from the model's probabilities, after up to three changes:
- temperature divides the logits: below 1 the likely tokens gain, above 1 the unlikely ones;
- top-k keeps the k most likely tokens (Fan et al. 2018, "Hierarchical Neural Story Generation");
- top-p keeps the fewest tokens whose probabilities reach p together (Holtzman et al. 2020, "The
  Curious Case of Neural Text Degeneration").
generate is version 4's, with draw in place of argmax; with a seed, it draws the same again.

What it costs: top-p sorts the vocabulary for each token.

Shapes: B batch, T new, S cached + new positions, H heads, D head_dim, E n_embd (H * D), V n_vocab.
"""
import utils  # first: a Ctrl-C while NumPy is being imported is quiet, too
import math
import sys

import numpy as np
import tqdm

from gpt2_v4_prealloc import KVCache, gpt2, pad_batch, softmax


def check_settings(temperature, top_k, top_p, seed=None):
    """ValueError unless each is in its range; NaN is in none."""
    for name, value, fits, span in [
            ("temperature", temperature, 0 <= temperature < math.inf, "0 or more"),
            ("top_k", top_k, top_k >= 0, "0 or more"), ("top_p", top_p, 0 <= top_p <= 1, "0 to 1"),
            ("seed", seed, seed is None or seed >= 0, "0 or more")]:
        if not fits:
            raise ValueError(f"{name} is {value}, but must be {span}")


def keep_top_p(logits, top_p):
    """-inf for all but the fewest, most likely tokens that together reach top_p; one at least."""
    order = np.argsort(logits, axis=-1, kind="stable")           # [..., V], least likely first
    p = softmax(np.take_along_axis(logits, order, axis=-1))
    # float32, as in Transformers: whether 0.1 is more than 1 - 0.9 is a matter of rounding
    drop = p.cumsum(axis=-1).astype(np.float32) <= np.float32(1 - top_p)
    drop[..., -1] = False                         # the most likely; argsort of an order undoes it
    return np.where(np.take_along_axis(drop, np.argsort(order, axis=-1), axis=-1), -np.inf, logits)


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """What the next token is drawn from: temperature, then top-k, then top-p, as in Transformers.

    temperature 0 is greedy, all for the first of the largest logits; top_k 0 and top_p 1 are off.
    Returns float64 [..., V]: choice, in draw, refuses sums that are not 1 within about 1e-8.
    """
    check_settings(temperature, top_k, top_p)
    V = logits.shape[-1]
    if temperature == 0:
        return (np.argmax(logits, axis=-1)[..., None] == np.arange(V)).astype(np.float64)
    logits = logits.astype(np.float64)
    # the largest becomes 0: whatever a tiny temperature makes of the others, it is not +inf
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    if 0 < top_k < V:
        kth = np.partition(logits, -top_k, axis=-1)[..., -top_k, None]  # [..., V] -> [..., 1]
        logits = np.where(logits < kth, -np.inf, logits)         # what equals the kth stays
    if top_p < 1:
        logits = keep_top_p(logits, top_p)
    return softmax(logits)


def draw(p, streams):
    """Draw a token for each row, [B, 1, V] -> [B, 1], with one number of the row's own stream."""
    return np.array([[stream.choice(p.shape[-1], p=row[0])] for row, stream in zip(p, streams)])


def generate(input_ids, attention_mask, params, n_head, n_tokens_to_generate,
             temperature=1.0, top_k=0, top_p=1.0, seed=None):
    """Sampling: draw the next token from probabilities(...), n_tokens_to_generate times.

    Takes pad_batch's two arrays, with a real token in each row. Returns only the new ids, [B, n].
    Row i draws from the i-th stream of the seed, so that no row changes what another one draws.
    ValueError as in version 4, and for a temperature, top_k, top_p or seed out of range.
    """
    T, n_ctx = input_ids.shape[1], len(params["wpe"])
    if T < 1 or n_tokens_to_generate < 1 or T + n_tokens_to_generate - 1 > n_ctx:
        raise ValueError(f"can't generate n = {n_tokens_to_generate} tokens after T = {T}: "
                         f"both must be at least 1, and T + n - 1 at most n_ctx = {n_ctx}")
    if not attention_mask.any(axis=-1).all():
        raise ValueError("a row of attention_mask has no real token: nothing to continue")
    check_settings(temperature, top_k, top_p, seed)
    n_layer, B, capacity = len(params["blocks"]), len(input_ids), T + n_tokens_to_generate - 1
    head_dim = params["wte"].shape[1] // n_head
    kv_caches = KVCache(n_layer, B, n_head, capacity, head_dim)
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(B)]

    # Prefill: the prompt, in pieces of 256, for speed; its last position predicts a new token.
    causal = (1 - np.tri(T, dtype=np.float32)) * -1e10           # [T, T], 0 where key <= query
    padding = (1 - attention_mask.astype(np.float32)) * -1e10    # [B, T], 0 at real keys
    mask = np.minimum(causal, padding[:, None, None, :])         # [B, 1, T, T]
    pos_ids = np.clip(np.cumsum(attention_mask, axis=-1) - 1, 0, None).astype(np.int64)  # [B, T]
    for start in range(0, T, 256):
        new = slice(start, start + 256)
        logits = gpt2(input_ids[:, new], pos_ids[:, new], mask[:, :, new, :new.stop], kv_caches,
                      **params, n_head=n_head, logits_to_keep=1)
    next_ids = draw(probabilities(logits, temperature, top_k, top_p), streams)  # [B, 1]
    input_ids = np.concatenate([input_ids, next_ids], axis=-1)   # [B, T] -> [B, T + 1]

    # Decode: one token per pass, as in version 4.
    padding = np.pad(padding, [(0, 0), (0, capacity - T)])       # [B, T] -> [B, capacity]
    pos_ids = pos_ids[:, -1:]                                    # [B, T] -> [B, 1]
    for _ in tqdm.tqdm(range(1, n_tokens_to_generate), "generating", initial=1,
                       total=n_tokens_to_generate):
        mask = padding[:, None, None, :kv_caches.length + 1]     # [B, 1, 1, S]
        pos_ids = pos_ids + 1
        logits = gpt2(next_ids, pos_ids, mask, kv_caches, **params, n_head=n_head)
        next_ids = draw(probabilities(logits, temperature, top_k, top_p), streams)  # [B, 1]
        input_ids = np.concatenate([input_ids, next_ids], axis=-1)  # one more column
    return input_ids[:, T:]


def add_options(parser):
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy, 1 as it is")
    parser.add_argument("--top_k", type=int, default=0, metavar="K",
                        help="keep the K most likely tokens (default: 0, all)")
    parser.add_argument("--top_p", type=float, default=1.0, metavar="P",
                        help="keep the fewest that reach P together (default: 1, all)")
    parser.add_argument("--seed", type=int, default=np.random.SeedSequence().entropy % 2**32,
                        help="draw the same again (default: a random one, printed)")


def main():
    with utils.command_line(__doc__, add_options=add_options) as job:
        settings = [vars(job.options)[name] for name in ("temperature", "top_k", "top_p", "seed")]
        try:
            new_ids = generate(*pad_batch(job.prompts), job.params, job.n_head,
                               job.n_tokens_to_generate, *settings)
        except ValueError as error:
            job.error(str(error))
        job.print(new_ids)
        print("drawn at temperature {}, top_k {}, top_p {}; --seed {} draws the same again".format(
            *settings), file=sys.stderr)


if __name__ == "__main__":
    main()
