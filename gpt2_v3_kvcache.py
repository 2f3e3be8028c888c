"""GPT-2 in NumPy, version 3: a KV cache, so that the past is not recomputed.

Attention is causal, so what a layer computes for a position does not depend on later tokens. Later
tokens read only its key and its value, so each layer keeps those two. Generation has two stages:
prefill runs the prompt, decode one new token per pass; generate makes masks and positions for both.

What it saves: for a prompt of 10 and 20 new tokens, 29 positions go through the model, not 390.
What it costs: memory, 2 * n_layer * B * S * E floats, which np.concatenate copies at every step.

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


def mha(x, c_attn, c_proj, n_head, mask, layer_cache=None):
    """Multi-head attention: each position attends to itself and to those before it."""
    B, T, E = x.shape
    qkv = linear(x, **c_attn).reshape(B, T, 3, n_head, E // n_head)  # [B, T, E] -> [B, T, 3, H, D]
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)                       # 3 x [B, H, T, D]
    if layer_cache is not None:
        if layer_cache["k"] is not None:
            k = np.concatenate([layer_cache["k"], k], axis=2)    # [B, H, T, D] -> [B, H, S, D]
            v = np.concatenate([layer_cache["v"], v], axis=2)    # [B, H, T, D] -> [B, H, S, D]
        layer_cache["k"], layer_cache["v"] = k, v
    x = attention(q, k, v, mask)
    x = x.transpose(0, 2, 1, 3).reshape(B, T, E)                 # [B, H, T, D] -> [B, T, E]
    return linear(x, **c_proj)


def transformer_block(x, ln_1, attn, ln_2, mlp, n_head, mask, layer_cache=None):
    """Attention, then the feed-forward network; each reads a normalized x and adds to x."""
    x = x + mha(layer_norm(x, **ln_1), **attn, n_head=n_head, mask=mask, layer_cache=layer_cache)
    return x + ffn(layer_norm(x, **ln_2), **mlp)


def gpt2(input_ids, pos_ids, mask, kv_caches, wte, wpe, blocks, ln_f, n_head, logits_to_keep=0):
    """Compute, at each position, the logits of the token that comes next.

    input_ids and pos_ids: [B, T]; mask: 2-D or more, broadcast to [B, H, T, S], 0 where a query may
    attend, -1e10 elsewhere; kv_caches: a {"k", "v"} per layer, extended in place, or None for none.
    Returns float32 logits [B, T, V]; if logits_to_keep > 0, of that many last positions only.
    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    x = wte[input_ids] + wpe[pos_ids]                            # [B, T] -> [B, T, E]
    for block, layer_cache in zip(blocks, kv_caches or [None] * len(blocks), strict=True):
        x = transformer_block(x, **block, n_head=n_head, mask=mask, layer_cache=layer_cache)
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


def generate(input_ids, attention_mask, params, n_head, n_tokens_to_generate):
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
    kv_caches = [{"k": None, "v": None} for _ in params["blocks"]]

    # Prefill: the whole prompt in one pass; its last position predicts the first new token.
    causal = (1 - np.tri(T, dtype=np.float32)) * -1e10           # [T, T], 0 where key <= query
    padding = (1 - attention_mask.astype(np.float32)) * -1e10    # [B, T], 0 at real keys
    mask = np.minimum(causal, padding[:, None, None, :])         # [B, 1, T, T]
    pos_ids = np.clip(np.cumsum(attention_mask, axis=-1) - 1, 0, None).astype(np.int64)  # [B, T]
    logits = gpt2(input_ids, pos_ids, mask, kv_caches, **params, n_head=n_head, logits_to_keep=1)
    next_ids = np.argmax(logits, axis=-1)                        # [B, 1, V] -> [B, 1]
    input_ids = np.concatenate([input_ids, next_ids], axis=-1)   # [B, T] -> [B, T + 1]

    # Decode: one token per pass. No key is in its future, so the causal mask is gone; the padding
    # mask stays and grows by a column; the token's position is its row's last + 1, not its column.
    pos_ids = pos_ids[:, -1:]                                    # [B, T] -> [B, 1]
    for _ in tqdm.tqdm(range(1, n_tokens_to_generate), "generating", initial=1,
                       total=n_tokens_to_generate):
        attention_mask = np.pad(attention_mask, [(0, 0), (0, 1)], constant_values=1)
        mask = (1 - attention_mask.astype(np.float32))[:, None, None, :] * -1e10  # [B, 1, 1, S]
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
