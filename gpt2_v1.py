"""GPT-2 in NumPy, version 1: recompute everything.

The whole model is here, and the loop that generates text with it. For each new token the loop
runs the prompt and all tokens generated so far through the model, takes the logits of the last
position, and appends the most likely token. Nothing is kept from one step to the next.

What it costs: a prompt of T tokens and n new ones put T + (T+1) + ... + (T+n-1) positions through
the model. For T = 10 and n = 20 that is 390, although only 29 of them are distinct.

Shapes: T positions, H heads, D head_dim, E n_embd (H * D), V n_vocab.
"""
import math

import numpy as np
import tqdm

import utils


def gelu(x):
    """GPT-2's activation: the tanh approximation of x * Phi(x) (Hendrycks & Gimpel 2016)."""
    # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), in place: no new array at each step
    y = x * x * x
    y *= 0.044715
    y += x
    y *= math.sqrt(2 / math.pi)
    np.tanh(y, out=y)
    y += 1
    y *= x
    y *= 0.5
    return y


def softmax(x, out=None):
    """Turn the last axis into probabilities; subtracting the maximum keeps exp from overflowing."""
    x = np.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    np.exp(x, out=x)
    x /= x.sum(axis=-1, keepdims=True)
    return x


def layer_norm(x, g, b, eps=1e-5):
    """Give each position mean 0 and variance 1, then a learned scale g and shift b."""
    E = x.shape[-1]                          # for one position, sum / E is faster than mean
    x = x - x.sum(axis=-1, keepdims=True) / E
    variance = (x * x).sum(axis=-1, keepdims=True) / E
    x /= np.sqrt(variance + eps)
    x *= g
    x += b
    return x


def linear(x, w, b):
    """Apply a linear layer to each position; w is [in, out], b is [out]."""
    y = x @ w                                                    # [T, in] -> [T, out]
    y += b
    return y


def ffn(x, c_fc, c_proj):
    """Feed-forward network: each position by itself, widened to 4E and projected back."""
    x = gelu(linear(x, **c_fc))                                  # [T, E] -> [T, 4E]
    return linear(x, **c_proj)                                   # [T, 4E] -> [T, E]


def attention(q, k, v, mask):
    """For each query, average the values, weighted by how well their keys match it."""
    # math, not np: under NumPy 2 a NumPy float64 scalar makes everything after it float64
    q = q / math.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(-1, -2)                              # [H, T, D] -> [H, T, T]
    scores += mask
    return softmax(scores, out=scores) @ v                       # [H, T, T] -> [H, T, D]


def mha(x, c_attn, c_proj, n_head, mask, keep=0):
    """Multi-head attention: each position attends to itself and to those before it."""
    T, E = x.shape
    qkv = linear(x, **c_attn).reshape(T, 3, n_head, E // n_head)  # [T, E] -> [T, 3, H, D]
    q, k, v = qkv.transpose(1, 2, 0, 3)                          # 3 x [H, T, D]
    x = attention(q[..., -keep:, :], k, v, mask)                 # q[..., -0:, :] is all of q
    x = x.transpose(1, 0, 2).reshape(-1, E)                      # [H, T, D] -> [T, E]
    return linear(x, **c_proj)


def transformer_block(x, ln_1, attn, ln_2, mlp, n_head, mask, keep=0):
    """Attention, then the feed-forward network; each reads a normalized x and adds to x.

    If keep > 0, the output is that of the last keep positions; the others give keys and values.
    """
    x = x[..., -keep:, :] + mha(layer_norm(x, **ln_1), **attn, n_head=n_head, mask=mask,
                                keep=keep)
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
    keeps = [0] * (len(blocks) - 1) + [logits_to_keep]           # 0 is all: the next block reads it
    for block, keep in zip(blocks, keeps):
        x = transformer_block(x, **block, n_head=n_head, mask=mask[..., -keep:, :],
                              keep=keep)
    x = layer_norm(x, **ln_f)
    return x @ wte.T                                             # [T, E] -> [T, V]


def generate(inputs, params, n_head, n_tokens_to_generate):
    """Greedy decoding: append the most likely next token, n_tokens_to_generate times.

    inputs: token ids [T]. Returns only the new ids, [n_tokens_to_generate].
    ValueError unless n >= 1 and T + n - 1 <= n_ctx: the last new token is never fed back.
    """
    T, n_ctx = len(inputs), len(params["wpe"])
    if n_tokens_to_generate < 1 or T + n_tokens_to_generate - 1 > n_ctx:
        raise ValueError(f"can't generate n = {n_tokens_to_generate} tokens after T = {T}: "
                         f"n must be at least 1, and T + n - 1 at most n_ctx = {n_ctx}")
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
