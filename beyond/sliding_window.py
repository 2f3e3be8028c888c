"""Beyond version 4: a sliding window, so that the cache stops growing.

Each position attends to the last `window` positions, itself among them, and to nothing older. So a
layer keeps that many keys and values, in a ring buffer: position p goes into slot p % window, where
p - window was. What is older is not all lost: those in the window have read it, a layer below.

A model trained without a window breaks when the first positions go: heads that find nothing to
read put their weight there. So n_sinks first positions may stay for good, as attention sinks.

What has to change is the mask: slots are not in the order of time, and attention doesn't mind, but
what a query may see follows from the true position in each slot. In decode that is all of them.

What it saves: memory, and the time to read it; both stay the same however long the text gets.
What it costs: past the window, the text is another one. (And n_ctx remains GPT-2's last position.)
Sources: Jiang et al. 2023, "Mistral 7B"; Xiao et al. 2023, "Efficient Streaming Language Models
with Attention Sinks".

Shapes: B batch, T new positions, S keys to read, H heads, D head_dim, V n_vocab.
"""
import utils  # first: a Ctrl-C while NumPy is being imported is quiet, too
import sys

import numpy as np
import tqdm

from gpt2_v4_prealloc import gpt2, pad_batch


class SlidingWindowCache:
    """Keys and values [n_layer, B, H, n_sinks + window, D]; lengths: the positions seen so far."""

    def __init__(self, n_layer, batch, n_head, window, head_dim, n_sinks=0):
        self.keys = np.empty((n_layer, batch, n_head, n_sinks + window, head_dim), np.float32)
        self.values = np.empty_like(self.keys)
        self.lengths, self.window, self.n_sinks = [0] * n_layer, window, n_sinks

    def kept(self, start, stop):
        """Those of positions start to stop - 1 that have a slot still when stop - 1 is written."""
        positions = np.arange(start, stop)
        return positions[(positions < self.n_sinks) | (positions >= stop - self.window)]

    def slots(self, positions):
        """Where positions are kept: sinks at the beginning, the others in the ring after them."""
        ring = self.n_sinks + (positions - self.n_sinks) % self.window
        return np.where(positions < self.n_sinks, positions, ring)

    def key_positions(self, start, T):
        """Positions [S] of update's keys for T new ones from start on; of T > 1, the old first."""
        if T > 1:
            return np.append(self.key_positions(start - 1, 1), np.arange(start, start + T))
        kept = self.kept(0, start + 1)
        return kept[np.argsort(self.slots(kept))]                # in the order of their slots

    def update(self, layer, k, v):
        """Write k and v [B, H, T, D]; return what their queries read, [B, H, S, D].

        For one position, views of the slots. Of several, the last overwrite what the first read:
        so the slots are copied before that, and the new keys and values come after them.
        """
        keys, values, start = self.keys[layer], self.values[layer], self.lengths[layer]
        T = k.shape[-2]
        if not k.shape == v.shape == (*keys.shape[:2], T, keys.shape[3]):
            raise ValueError(f"k {k.shape} and v {v.shape} don't fit a cache of {keys.shape}")
        all_keys = np.concatenate([keys[:, :, :start], k], axis=2) if T > 1 else keys
        all_values = np.concatenate([values[:, :, :start], v], axis=2) if T > 1 else values
        kept = self.kept(start, start + T)
        keys[:, :, self.slots(kept)] = k[:, :, kept - start]
        values[:, :, self.slots(kept)] = v[:, :, kept - start]
        self.lengths[layer] = start + T
        return all_keys[:, :, :start + T], all_values[:, :, :start + T]  # at first, some are empty

    @property
    def nbytes(self):
        """Bytes allocated: those of n_sinks + window positions, whatever the length."""
        return self.keys.nbytes + self.values.nbytes


def next_tokens(new_ids, start, kv_caches, params, n_head):
    """One pass over new_ids [B, T], at positions from start on; what comes next is [B, 1]."""
    query = np.arange(start, start + new_ids.shape[1])[:, None]  # [T, 1]; .T serves all rows
    key = kv_caches.key_positions(start, len(query))             # [S]
    in_window = query - key < kv_caches.window                   # [T, S]
    seen = (key <= query) & (in_window | (key < kv_caches.n_sinks))
    mask = np.where(seen, 0, -1e10).astype(np.float32)           # [T, S]
    logits = gpt2(new_ids, query.T, mask, kv_caches, **params, n_head=n_head, logits_to_keep=1)
    return np.argmax(logits, axis=-1)                            # [B, 1, V] -> [B, 1]


def generate(input_ids, attention_mask, params, n_head, n_tokens_to_generate, window, n_sinks=0):
    """Greedy decoding; each position attends to the last `window` ones and the first n_sinks.

    Takes pad_batch's two arrays, without padding. Returns only the new ids, [B, n].
    ValueError as in version 4, for padding, and unless window >= 1 and n_sinks >= 0.
    """
    (B, T), n_ctx = input_ids.shape, len(params["wpe"])
    if T < 1 or n_tokens_to_generate < 1 or T + n_tokens_to_generate - 1 > n_ctx:
        raise ValueError(f"can't generate n = {n_tokens_to_generate} tokens after T = {T}: "
                         f"both must be at least 1, and T + n - 1 at most n_ctx = {n_ctx}")
    if window < 1 or n_sinks < 0:
        raise ValueError(f"window = {window} must be at least 1, n_sinks = {n_sinks} at least 0")
    if not attention_mask.all():
        raise ValueError(f"rows of {(attention_mask != 0).sum(axis=-1)} tokens: a sliding window "
                         f"takes rows of equal length, without padding")
    end = T + n_tokens_to_generate - 1
    window, n_sinks = min(window, end), min(n_sinks, max(end - window, 0))  # one slot a position
    head_dim = params["wte"].shape[1] // n_head
    kv_caches = SlidingWindowCache(len(params["blocks"]), B, n_head, window, head_dim, n_sinks)

    # Prefill in pieces no longer than the window, so that the copies aren't either; then decode.
    size = min(window, 256)
    for start in range(0, T, size):
        next_ids = next_tokens(input_ids[:, start:start + size], start, kv_caches, params, n_head)
    new_ids = [next_ids]
    for start in tqdm.tqdm(range(T, end), "generating", initial=1, total=n_tokens_to_generate):
        new_ids.append(next_tokens(new_ids[-1], start, kv_caches, params, n_head))
    return np.concatenate(new_ids, axis=-1)                      # n x [B, 1] -> [B, n]


def add_options(parser):
    parser.add_argument("--window", type=utils.positive, default=32, metavar="N",
                        help="how many last positions to keep (default: 32)")
    parser.add_argument("--n_sinks", type=int, default=0, metavar="N",
                        help="how many first positions to keep besides (default: 0)")


def main():
    with utils.command_line(__doc__, add_options=add_options) as job:
        settings = job.options.window, job.options.n_sinks
        try:
            new_ids = generate(*pad_batch(job.prompts), job.params, job.n_head,
                               job.n_tokens_to_generate, *settings)
        except ValueError as error:
            job.error(str(error))
        job.print(new_ids)
        end = len(job.prompts[0]) + job.n_tokens_to_generate - 1
        print(f"the cache kept {min(sum(settings), end)} of {end} positions", file=sys.stderr)


if __name__ == "__main__":
    main()
