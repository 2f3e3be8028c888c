"""GPT-2 in NumPy, version 4: a preallocated cache, so that the past is not copied.

np.concatenate copies the whole past at every step, 33.6 million entries in each layer on the way to
8,192 positions. But the final length, T + n - 1, is known from the start. So buffers of that size
are allocated once, new keys and values go into free slots, attention reads views of filled ones.

What it costs: memory for the whole generation is reserved from the start.

Shapes: B batch, T new, S cached + new positions, H heads, D head_dim, E n_embd (H * D), V n_vocab.
"""
import utils  # first: a Ctrl-C while NumPy is being imported is quiet, too

import math

import numpy as np
import tqdm


def gelu(x):
    """GPT-2's activation: the tanh approximation of x * Phi(x) (Hendrycks & Gimpel 2016)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def softmax(x):
    """Turn the last axis into probabilities; subtracting the maximum keeps exp from overflowing."""
    x = x - x.max(axis=-1, keepdims=True)
    np.exp(x, out=x)                         # in place, because no arrays are as large as scores
    x /= x.sum(axis=-1, keepdims=True)
    return x


def layer_norm(x, g, b, eps=1e-5):
    """Give each position mean 0 and variance 1, then a learned scale g and shift b."""
    x = x - x.mean(axis=-1, keepdims=True)
    variance = (x * x).mean(axis=-1, keepdims=True)
    return g * x / np.sqrt(variance + eps) + b


def linear(x, w, b=0):
    """Apply a linear layer to each position; w is [in, out], b is [out]."""
    y = x.reshape(-1, x.shape[-1]) @ w + b                       # [B * T, out]: one matmul
    return y.reshape(*x.shape[:-1], -1)                          # [B, T, in] -> [B, T, out]


def ffn(x, c_fc, c_proj):
    """Feed-forward network: each position by itself, widened to 4E and projected back."""
    x = gelu(linear(x, **c_fc))                                  # [B, T, E] -> [B, T, 4E]
    return linear(x, **c_proj)                                   # [B, T, 4E] -> [B, T, E]


def attention(q, k, v, mask):
    """For each query, average the values, weighted by how well their keys match it."""
    # math, not np: under NumPy 2 a NumPy float64 scalar makes everything after it float64
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])     # [B, H, T, D] -> [B, H, T, S]
    return softmax(scores + mask) @ v                            # [B, H, T, S] -> [B, H, T, D]


def kv_cache_bytes(n_layer, batch, n_positions, n_head, head_dim, bytes_per_value=4):
    """Size of a cache in bytes: 2 for keys and values; n_head is the number of KV heads."""
    return 2 * n_layer * batch * n_positions * n_head * head_dim * bytes_per_value


class KVCache:
    """Keys and values [n_layer, B, H, capacity, D]; lengths: the positions each layer holds."""

    def __init__(self, n_layer, batch, n_head, capacity, head_dim, dtype=np.float32):
        self.keys = np.empty((n_layer, batch, n_head, capacity, head_dim), dtype)
        self.values = np.empty_like(self.keys)
        self.lengths = [0] * n_layer

    def update(self, layer, k, v):
        """Append k and v [B, H, T, D]; return views of all keys and values so far, [B, H, S, D].

        ValueError, with nothing written, if they don't match the cache or exceed its capacity.
        """
        keys, values, start = self.keys[layer], self.values[layer], self.lengths[layer]
        B, H, capacity, D = keys.shape
        end = start + k.shape[-2]
        if not k.shape == v.shape == (B, H, end - start, D):
            raise ValueError(f"k {k.shape} and v {v.shape} don't fit a cache of {keys.shape}")
        if end > capacity:
            raise ValueError(f"{end} positions exceed the cache's capacity of {capacity}")
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        self.lengths[layer] = end
        return keys[:, :, :end], values[:, :, :end]

    @property
    def length(self):
        """Positions in every layer. RuntimeError if they disagree: a pass stopped part-way."""
        if len(set(self.lengths)) > 1:
            raise RuntimeError(f"a pass stopped part-way: truncate the layers, now {self.lengths}")
        return self.lengths[0]

    def truncate(self, length):
        """Drop what is after length: a wrong guess, a failed pass. ValueError if there is less."""
        if not 0 <= length <= min(self.lengths):
            raise ValueError(f"can't truncate to {length} positions of {self.lengths}")
        self.lengths = [length] * len(self.lengths)

    def reset(self):
        """Forget everything, to use the buffers for another text."""
        self.truncate(0)

    @property
    def nbytes(self):
        """Bytes allocated, filled or not: kv_cache_bytes of the capacity."""
        return self.keys.nbytes + self.values.nbytes


def mha(x, c_attn, c_proj, n_head, mask, cache=None, layer=None):
    """Multi-head attention: each position attends to itself and to those before it."""
    B, T, E = x.shape
    qkv = linear(x, **c_attn).reshape(B, T, 3, n_head, E // n_head)  # [B, T, E] -> [B, T, 3, H, D]
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)                       # 3 x [B, H, T, D]
    if cache is not None:
        k, v = cache.update(layer, k, v)                         # [B, H, T, D] -> [B, H, S, D]
    x = attention(q, k, v, mask)
    x = x.transpose(0, 2, 1, 3).reshape(B, T, E)                 # [B, H, T, D] -> [B, T, E]
    return linear(x, **c_proj)


def transformer_block(x, ln_1, attn, ln_2, mlp, n_head, mask, cache=None, layer=None):
    """Attention, then the feed-forward network; each reads a normalized x and adds to x."""
    x = x + mha(layer_norm(x, **ln_1), **attn, n_head=n_head, mask=mask, cache=cache, layer=layer)
    return x + ffn(layer_norm(x, **ln_2), **mlp)


def gpt2(input_ids, pos_ids, mask, kv_caches, wte, wpe, blocks, ln_f, n_head, logits_to_keep=0):
    """Compute, at each position, the logits of the token that comes next.

    input_ids and pos_ids: [B, T]; mask: 2-D or more, broadcast to [B, H, T, S], 0 where a query may
    attend, -1e10 elsewhere; kv_caches: a KVCache, extended in place, or None for no cache.
    Returns float32 logits [B, T, V]; if logits_to_keep > 0, of that many last positions only.
    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    x = wte[input_ids] + wpe[pos_ids]                            # [B, T] -> [B, T, E]
    for layer, block in enumerate(blocks):
        x = transformer_block(x, **block, n_head=n_head, mask=mask, cache=kv_caches, layer=layer)
    x = layer_norm(x[..., -logits_to_keep:, :], **ln_f)          # -0: takes them all
    return linear(x, wte.T)                                      # [B, T, E] -> [B, T, V]


def pad_batch(prompts):
    """Lists of token ids -> input_ids [B, T] int64, attention_mask [B, T] float32.

    Pads on the left, with 0 in both. ValueError if there is no prompt, or an empty one.
    """
    if len(prompts) == 0 or min(map(len, prompts)) == 0:
        raise ValueError("a batch needs at least one prompt, and each prompt at least one token")
    T = max(map(len, prompts))
    input_ids = [[0] * (T - len(prompt)) + list(prompt) for prompt in prompts]
    attention_mask = [[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return np.array(input_ids, dtype=np.int64), np.array(attention_mask, dtype=np.float32)


def generate(input_ids, attention_mask, params, n_head, n_tokens_to_generate, kv_caches=None):
    """Greedy decoding: append the most likely next token, n_tokens_to_generate times.

    Takes pad_batch's two arrays, with a real token in each row. Returns only the new ids, [B, n].
    ValueError unless T >= 1, n >= 1 and T + n - 1 <= n_ctx: the last new token is never fed back.
    """
    T, n_ctx = input_ids.shape[1], len(params["wpe"])
    if T < 1 or n_tokens_to_generate < 1 or T + n_tokens_to_generate - 1 > n_ctx:
        raise ValueError(f"can't generate n = {n_tokens_to_generate} tokens after T = {T}: "
                         f"both must be at least 1, and T + n - 1 at most n_ctx = {n_ctx}")
    if not attention_mask.any(axis=-1).all():
        raise ValueError("a row of attention_mask has no real token: nothing to continue")
    n_layer, B, capacity = len(params["blocks"]), len(input_ids), T + n_tokens_to_generate - 1
    head_dim = params["wte"].shape[1] // n_head
    kv_caches = kv_caches or KVCache(n_layer, B, n_head, capacity, head_dim)  # else a new one

    # Prefill: the prompt, in pieces of 256, for speed; its last position predicts a new token.
    causal = (1 - np.tri(T, dtype=np.float32)) * -1e10           # [T, T], 0 where key <= query
    padding = (1 - attention_mask.astype(np.float32)) * -1e10    # [B, T], 0 at real keys
    mask = np.minimum(causal, padding[:, None, None, :])         # [B, 1, T, T]
    pos_ids = np.clip(np.cumsum(attention_mask, axis=-1) - 1, 0, None).astype(np.int64)  # [B, T]
    for start in range(0, T, 256):
        new = slice(start, start + 256)
        logits = gpt2(input_ids[:, new], pos_ids[:, new], mask[:, :, new, :new.stop], kv_caches,
                      **params, n_head=n_head, logits_to_keep=1)
    next_ids = np.argmax(logits, axis=-1)                        # [B, 1, V] -> [B, 1]
    input_ids = np.concatenate([input_ids, next_ids], axis=-1)   # [B, T] -> [B, T + 1]

    # Decode: one token per pass. No key is in its future, so the causal mask is gone; the padding
    # mask stays and grows by a column; the token's position is its row's last + 1, not its column.
    padding = np.pad(padding, [(0, 0), (0, capacity - T)])       # [B, T] -> [B, capacity]
    pos_ids = pos_ids[:, -1:]                                    # [B, T] -> [B, 1]
    for _ in tqdm.tqdm(range(1, n_tokens_to_generate), "generating", initial=1,
                       total=n_tokens_to_generate):
        mask = padding[:, None, None, :kv_caches.length + 1]     # [B, 1, 1, S]
        pos_ids = pos_ids + 1
        logits = gpt2(next_ids, pos_ids, mask, kv_caches, **params, n_head=n_head)
        next_ids = np.argmax(logits, axis=-1)                    # [B, 1, V] -> [B, 1]
        input_ids = np.concatenate([input_ids, next_ids], axis=-1)  # one more column
    return input_ids[:, T:]


def main():
    with utils.command_line(__doc__) as job:
        batch = pad_batch(job.prompts)
        new_ids = generate(*batch, job.params, job.n_head, job.n_tokens_to_generate)
        job.print(new_ids)


if __name__ == "__main__":
    main()
