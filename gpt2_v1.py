"""GPT-2 in NumPy, version 1: recompute everything.

The whole model is here, and the loop that generates text with it. For each new token the loop
runs the prompt and all tokens generated so far through the model, takes the logits of the last
position, and appends the most likely token. Nothing is kept from one step to the next.

What it costs: a prompt of T tokens and n new ones put T + (T+1) + ... + (T+n-1) positions through
the model. For T = 10 and n = 20 that is 390, although only 29 of them are distinct.

Shapes: T positions, H heads, D head_dim, E n_embd (H * D), V n_vocab.
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
    return x @ w + b                                             # [T, in] -> [T, out]


def ffn(x, c_fc, c_proj):
    """Feed-forward network: each position by itself, widened to 4E and projected back."""
    x = gelu(linear(x, **c_fc))                                  # [T, E] -> [T, 4E]
    return linear(x, **c_proj)                                   # [T, 4E] -> [T, E]


def attention(q, k, v, mask):
    """For each query, average the values, weighted by how well their keys match it."""
    # math, not np: under NumPy 2 a NumPy float64 scalar makes everything after it float64
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])     # [H, T, D] -> [H, T, T]
    return softmax(scores + mask) @ v                            # [H, T, T] -> [H, T, D]


def mha(x, c_attn, c_proj, n_head, mask):
    """Multi-head attention: each position attends to itself and to those before it."""
    T, E = x.shape
    qkv = linear(x, **c_attn).reshape(T, 3, n_head, E // n_head)  # [T, E] -> [T, 3, H, D]
    q, k, v = qkv.transpose(1, 2, 0, 3)                          # 3 x [H, T, D]
    x = attention(q, k, v, mask)
    x = x.transpose(1, 0, 2).reshape(T, E)                       # [H, T, D] -> [T, E]
    return linear(x, **c_proj)


def transformer_block(x, ln_1, attn, ln_2, mlp, n_head, mask):
    """Attention, then the feed-forward network; each reads a normalized x and adds to x."""
    x = x + mha(layer_norm(x, **ln_1), **attn, n_head=n_head, mask=mask)
    return x + ffn(layer_norm(x, **ln_2), **mlp)


def gpt2(inputs, wte, wpe, blocks, ln_f, n_head, logits_to_keep=0):
    """Compute, at each position, the logits of the token that comes next.

    inputs: token ids [T].
    Returns float32 logits [T, V]; if logits_to_keep > 0, of that many last positions only.
    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    T = len(inputs)
    mask = (1 - np.tri(T, dtype=np.float32)) * -1e10             # [T, T], 0 where key <= query
    x = wte[inputs] + wpe[:T]                                    # [T] -> [T, E]
    for block in blocks:
        x = transformer_block(x, **block, n_head=n_head, mask=mask)
    x = layer_norm(x[..., -logits_to_keep:, :], **ln_f)          # -0: takes them all
    return linear(x, wte.T)                                      # [T, E] -> [T, V]


def generate(inputs, params, n_head, n_tokens_to_generate):
    """Greedy decoding: append the most likely next token, n_tokens_to_generate times.

    inputs: token ids [T]. Returns only the n new ids, [n].
    ValueError unless T >= 1, n >= 1 and T + n - 1 <= n_ctx: the last new token is never fed back.
    """
    T, n_ctx = len(inputs), len(params["wpe"])
    if T < 1 or n_tokens_to_generate < 1 or T + n_tokens_to_generate - 1 > n_ctx:
        raise ValueError(f"can't generate n = {n_tokens_to_generate} tokens after T = {T}: "
                         f"both must be at least 1, and T + n - 1 at most n_ctx = {n_ctx}")
    ids = np.array(inputs)                                       # [T]
    for _ in tqdm.tqdm(range(n_tokens_to_generate), "generating"):
        logits = gpt2(ids, **params, n_head=n_head, logits_to_keep=1)
        next_id = np.argmax(logits[-1])                          # [1, V] -> []
        ids = np.append(ids, next_id)                            # [T] -> [T + 1]
    return ids[T:]


def main():
    with utils.command_line(__doc__, max_prompts=1) as job:
        new_ids = generate(job.prompts[0], job.params, job.n_head, job.n_tokens_to_generate)
        job.print([new_ids])


if __name__ == "__main__":
    main()
