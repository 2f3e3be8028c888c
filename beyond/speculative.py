"""Beyond version 4: speculative decoding, so that one pass may give several tokens.

A decode step reads all the weights to compute one position; a few more in the same pass cost less
than a pass each. So guess the next tokens, a draft, run it through the model in one pass, and keep
as much of it as the model says itself; what was wrong, the cache forgets. But for ties within
rounding, the text is version 4's, whatever is guessed: a bad guess costs time, never a token.

The guess is prompt lookup: the last two tokens are looked up in the text so far, and what followed
them there may follow again. Names, phrases and quotations do come back, and no second model is
needed.

What it saves: passes, where a text repeats itself.
What it costs: a pass over 9 positions takes longer than one over 1, so that wrong guesses lose
time. And it is for one text at a time: the rows of a batch would have guesses of unequal length.
Sources: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Saxena
2023, "Prompt Lookup Decoding".

Shapes: B batch (1), T new, G guessed, S cached + new positions, V n_vocab.
"""
import utils  # first: a Ctrl-C while NumPy is being imported is quiet, too
import sys

import numpy as np
import tqdm

from gpt2_v4_prealloc import KVCache, gpt2, pad_batch


def look_up(ids, n_draft, ngram):
    """Guess n_draft tokens: what followed the last ngram tokens of ids where they stood before.

    Takes the latest such place; [] if there is none.
    """
    for start in range(len(ids) - ngram - 1, -1, -1):
        if ids[start:start + ngram] == ids[-ngram:]:
            text = list(ids)
            for n in range(n_draft):              # past the end of ids, it copies the guess
                text.append(text[start + ngram + n])
            return text[len(ids):]
    return []


def check_guess(ids, guess, kv_caches, params, n_head):
    """Run what is not in the cache yet, then the guess; return the tokens the model says.

    The guess as far as it is right, and one token more: the model's own, where the guess ends or
    goes wrong. It is sure, as all before it is right. The cache keeps ids and the right guesses.
    """
    start = kv_caches.length
    tokens = np.array([ids[start:] + guess])                     # [1, T]
    pos_ids = np.arange(start, len(ids) + len(guess))[None]      # [1, T]
    keys = np.arange(len(ids) + len(guess))                      # [S]
    mask = (keys > pos_ids[0, :, None]).astype(np.float32) * -1e10  # [T, S], 0 where key <= query
    logits = gpt2(tokens, pos_ids, mask, kv_caches, **params, n_head=n_head,
                  logits_to_keep=1 + len(guess))
    said = np.argmax(logits[0], axis=-1).tolist()                # [1, G + 1, V] -> G + 1 ids
    n_right = 0
    while n_right < len(guess) and guess[n_right] == said[n_right]:
        n_right += 1
    kv_caches.truncate(len(ids) + n_right)
    return said[:n_right + 1]


def speculate(input_ids, attention_mask, params, n_head, n_tokens_to_generate, n_draft=8, ngram=2):
    """Yield, pass by pass, the list of tokens that the pass has added to the text."""
    if len(input_ids) != 1:
        raise ValueError(f"{len(input_ids)} rows, but speculative decoding takes one")
    if n_draft < 1 or ngram < 1:
        raise ValueError(f"n_draft = {n_draft} and ngram = {ngram} must both be at least 1")
    ids = input_ids[attention_mask != 0].tolist()                # [1, T] -> T ids, no padding
    T, n_ctx = len(ids), len(params["wpe"])
    if T < 1 or n_tokens_to_generate < 1 or T + n_tokens_to_generate - 1 > n_ctx:
        raise ValueError(f"can't generate n = {n_tokens_to_generate} tokens after T = {T}: "
                         f"both must be at least 1, and T + n - 1 at most n_ctx = {n_ctx}")
    n_layer, head_dim = len(params["blocks"]), params["wte"].shape[1] // n_head
    kv_caches = KVCache(n_layer, 1, n_head, T + n_tokens_to_generate - 1, head_dim)

    # The first pass is prefill: nothing of the prompt is in the cache yet.
    with tqdm.tqdm(total=n_tokens_to_generate, desc="generating") as bar:
        while (n_left := T + n_tokens_to_generate - len(ids)) > 0:
            guess = look_up(ids, min(n_draft, n_left - 1), ngram)  # the pass adds one more
            new_ids = check_guess(ids, guess, kv_caches, params, n_head)
            ids += new_ids
            bar.update(len(new_ids))
            yield new_ids


def generate(input_ids, attention_mask, params, n_head, n_tokens_to_generate, n_draft=8, ngram=2):
    """Greedy decoding, several tokens a pass where guesses of up to n_draft tokens are right.

    Takes pad_batch's two arrays, of one row. Returns only the new ids, [1, n].
    ValueError as in version 4, and unless there is one row, n_draft >= 1 and ngram >= 1.
    """
    passes = speculate(input_ids, attention_mask, params, n_head, n_tokens_to_generate, n_draft,
                       ngram)
    return np.array([[token for new_ids in passes for token in new_ids]])


def add_options(parser):
    parser.add_argument("--n_draft", type=utils.positive, default=8, metavar="N",
                        help="how many tokens to guess at a time (default: 8)")
    parser.add_argument("--ngram", type=utils.positive, default=2, metavar="N",
                        help="how many tokens to look up (default: 2)")


def main():
    with utils.command_line(__doc__, max_prompts=1, add_options=add_options) as job:
        passes = list(speculate(*pad_batch(job.prompts), job.params, job.n_head,
                                job.n_tokens_to_generate, job.options.n_draft, job.options.ngram))
        new_ids = sum(passes, [])
        job.print([new_ids])
        print(f"{len(new_ids)} tokens in {len(passes)} passes: {len(new_ids) - len(passes)} were "
              f"guessed right", file=sys.stderr)


if __name__ == "__main__":
    main()
