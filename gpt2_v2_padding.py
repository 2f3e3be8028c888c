"""GPT-2 in NumPy, version 2: several prompts at once, padded on the left.

A pass reads all the weights, whether for one prompt or for eight. But a batch is a rectangle: short
prompts are padded on the left, so that every row's newest token is in the last column. The real
tokens, marked by attention_mask, are all that count as positions and all that is attended to.

What it costs: padding is computed like any token, and each step still recomputes the past.

Shapes: B batch, T positions, H heads, D head_dim, E n_embd (H * D), V n_vocab.
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
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])     # [B, H, T, D] -> [B, H, T, T]
    return softmax(scores + mask) @ v                            # [B, H, T, T] -> [B, H, T, D]


def mha(x, c_attn, c_proj, n_head, mask):
    """Multi-head attention: each position attends to itself and to those before it."""
    B, T, E = x.shape
    qkv = linear(x, **c_attn).reshape(B, T, 3, n_head, E // n_head)  # [B, T, E] -> [B, T, 3, H, D]
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)                       # 3 x [B, H, T, D]
    x = attention(q, k, v, mask)
    x = x.transpose(0, 2, 1, 3).reshape(B, T, E)                 # [B, H, T, D] -> [B, T, E]
    return linear(x, **c_proj)


def transformer_block(x, ln_1, attn, ln_2, mlp, n_head, mask):
    """Attention, then the feed-forward network; each reads a normalized x and adds to x."""
    x = x + mha(layer_norm(x, **ln_1), **attn, n_head=n_head, mask=mask)
    return x + ffn(layer_norm(x, **ln_2), **mlp)


def gpt2(input_ids, attention_mask, wte, wpe, blocks, ln_f, n_head, logits_to_keep=0):
    """Compute, at each position, the logits of the token that comes next.

    input_ids and attention_mask: [B, T]; the mask is 1 at real tokens and 0 at padding.
    Returns float32 logits [B, T, V]; if logits_to_keep > 0, of that many last positions only.
    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    T = input_ids.shape[1]
    causal = (1 - np.tri(T, dtype=np.float32)) * -1e10           # [T, T], 0 where key <= query
    padding = (1 - attention_mask.astype(np.float32)) * -1e10    # [B, T], 0 at real keys
    mask = np.minimum(causal, padding[:, None, None, :])         # [B, 1, T, T]
    pos_ids = np.clip(np.cumsum(attention_mask, axis=-1) - 1, 0, None).astype(np.int64)  # [B, T]
    x = wte[input_ids] + wpe[pos_ids]                            # [B, T] -> [B, T, E]
    for block in blocks:
        x = transformer_block(x, **block, n_head=n_head, mask=mask)
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
    for _ in tqdm.tqdm(range(n_tokens_to_generate), "generating"):
        logits = gpt2(input_ids, attention_mask, **params, n_head=n_head, logits_to_keep=1)
        next_ids = np.argmax(logits, axis=-1)                    # [B, 1, V] -> [B, 1]
        input_ids = np.concatenate([input_ids, next_ids], axis=-1)  # one more column
        attention_mask = np.pad(attention_mask, [(0, 0), (0, 1)], constant_values=1)
    return input_ids[:, T:]


def main():
    with utils.command_line(__doc__) as job:
        batch = pad_batch(job.prompts)
        new_ids = generate(*batch, job.params, job.n_head, job.n_tokens_to_generate)
        job.print(new_ids)


if __name__ == "__main__":
    main()
