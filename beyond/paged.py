"""Beyond version 4: paged attention and continuous batching, so that no memory is held in vain.

Version 4 reserves room for the longest text in every row of a batch, until the last row ends. Here,
keys and values live in pages of 16 positions, from one pool. A request takes a page when those in
its table are full, and gives all back at its end: then the next moves in (continuous batching).
- If the pool runs dry, the request that came last gives its pages back, and waits. What it has said
  is kept, and computed again together with its prompt (preemption by recomputation).
- Requests that begin with the same tokens share the full pages of that beginning. Nobody writes
  into a full page any more, so that all it takes is to count its users.

What it saves: memory, and so room for more requests; and the work on what is shared.
What it costs: NumPy can't read pages where they lie, as a GPU can; each step copies them together.
Sources: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (vLLM); Yu et al. 2022, "Orca", for continuous batching.

Shapes: B requests in a pass, T new, P pages, S = P * page_size positions, H heads, D head_dim.
"""
import utils  # first: a Ctrl-C while NumPy is being imported is quiet, too
import collections
import sys

import numpy as np
import tqdm

from gpt2_v4_prealloc import gpt2


class PagedKVCache:
    """Pages [n_layer, 2, H, n_pages, page_size, D], 2 for keys and values, and who uses them."""

    def __init__(self, n_layer, n_head, head_dim, n_pages, page_size=16):
        # zeros: what is not written yet gets weight 0 in attention, and 0 * NaN would be NaN
        self.pool = np.zeros((n_layer, 2, n_head, n_pages, page_size, head_dim), np.float32)
        self.n_pages, self.page_size, self.nbytes = n_pages, page_size, self.pool.nbytes
        self.reset()

    def reset(self):
        """Take all pages back."""
        self.free, self.n_users = list(range(self.n_pages)), collections.Counter()
        self.page_of = {}                         # all tokens up to the end of a full page -> page

    def admit(self, request):
        """Give a request the pages for its ids, shared ones first; False if too few are free."""
        ids, size = request.ids, self.page_size
        beginnings = [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]
        # without gaps, as who has a page has all before it; the last token is left to compute
        pages = [self.page_of[tokens] for tokens in beginnings
                 if tokens in self.page_of and len(tokens) < len(ids)]
        n_new = -(-len(ids) // size) - len(pages)                # rounded up
        if n_new > len(self.free):
            return False
        request.n_cached = len(pages) * size
        request.pages = pages + [self.free.pop() for _ in range(n_new)]
        self.n_users.update(request.pages)
        for tokens, page in zip(beginnings, request.pages):      # the next pass will fill these
            self.page_of.setdefault(tokens, page)
        return True

    def give_back(self, request):
        """Count one user less; a page without users is free, and can't be shared any more."""
        self.n_users.subtract(request.pages)
        self.free += [page for page in request.pages if self.n_users[page] == 0]
        self.page_of = {tokens: page for tokens, page in self.page_of.items() if self.n_users[page]}

    def select(self, requests, pos_ids):
        """update gets only k and v: note where pos_ids [B, T] are; return the mask [B, 1, T, S]."""
        P = max(len(request.pages) for request in requests)
        # [B, P]; page 0 stands where a row has no more pages, and the mask hides it
        self.tables = np.array([r.pages + [0] * (P - len(r.pages)) for r in requests])
        self.new_pages = np.take_along_axis(self.tables, pos_ids // self.page_size, 1)  # [B, T]
        self.offsets = pos_ids % self.page_size                  # [B, T]
        return (np.arange(P * self.page_size) > pos_ids[:, None, :, None]) * np.float32(-1e10)

    def update(self, layer, k, v):
        """Write k, v [B, H, T, D] into pages; return all that the rows have, as [2, B, H, S, D]."""
        pool = self.pool[layer]                                  # [2, H, n_pages, page_size, D]
        pool[:, :, self.new_pages, self.offsets] = np.stack([k, v]).swapaxes(1, 2)  # 2, H, B, T, D
        rows = pool.take(self.tables, axis=2)                    # [2, H, B, P, page_size, D]
        return rows.reshape(*rows.shape[:3], -1, rows.shape[-1]).swapaxes(1, 2)  # [2, B, H, S, D]


class Request:
    """A text that ends at end = len(prompt) + n ids; its pages; n_cached, the positions in them."""

    def __init__(self, prompt, n):
        self.ids, self.end = [int(token) for token in prompt], len(prompt) + n
        self.pages, self.n_cached = [], 0


def append_tokens(requests, kv_caches, params, n_head):
    """One pass over what is not cached yet, as many ids of each request; append a token to each."""
    input_ids = np.array([r.ids[r.n_cached:] for r in requests])  # [B, T]
    pos_ids = np.array([range(r.n_cached, len(r.ids)) for r in requests])  # [B, T]
    mask = kv_caches.select(requests, pos_ids)                   # [B, 1, T, S]
    logits = gpt2(input_ids, pos_ids, mask, kv_caches, **params, n_head=n_head, logits_to_keep=1)
    for request, token in zip(requests, np.argmax(logits[:, 0], axis=-1)):  # [B, 1, V] -> [B]
        request.n_cached = len(request.ids)
        request.ids.append(int(token))


def make_room(running, waiting, kv_caches):
    """A page for each request whose pages are full; if none is free, preempt the last to come."""
    for request in list(running):
        while request in running and request.n_cached == len(request.pages) * kv_caches.page_size:
            if kv_caches.free:
                request.pages.append(kv_caches.free.pop())
                kv_caches.n_users[request.pages[-1]] = 1
            else:
                waiting.appendleft(running.pop())
                kv_caches.give_back(waiting[0])


def serve(requests, kv_caches, params, n_head, max_batch, after_pass):
    """Run all requests to their end; whatever happens, all pages are free then."""
    waiting, running = collections.deque(requests), []
    bar = tqdm.tqdm(total=sum(r.end - len(r.ids) for r in requests), desc="generating")
    try:
        while waiting or running:
            if waiting and len(running) < max_batch and kv_caches.admit(waiting[0]):
                running.append(waiting.popleft())
                batch = running[-1:]                             # prefill
            else:
                make_room(running, waiting, kv_caches)
                batch = running                                  # decode
            append_tokens(batch, kv_caches, params, n_head)
            bar.update(len(batch))
            after_pass(running, kv_caches)
            for request in [r for r in running if len(r.ids) == r.end]:
                running.remove(request)
                kv_caches.give_back(request)
    finally:                                                     # so that the cache can go on
        kv_caches.reset()


def generate(prompts, params, n_head, n_tokens_to_generate, n_pages=None, page_size=16,
             max_batch=8, after_pass=lambda running, kv_caches: None):
    """Greedy decoding of prompts, lists of ids: a list of the new ids of each, as if it were alone.

    n_tokens_to_generate: a number, or one for each; n_pages: enough, if None. ValueError, before
    anything runs, if a request could never fit. after_pass(running, kv_caches) may look on.
    """
    for name, value in ("n_pages", n_pages), ("page_size", page_size), ("max_batch", max_batch):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    ns, (n_ctx, E) = np.broadcast_to(n_tokens_to_generate, len(prompts)), params["wpe"].shape
    requests = [Request(prompt, n) for prompt, n in zip(prompts, ns)]
    needed = [-(-(request.end - 1) // page_size) for request in requests]  # pages, rounded up
    n_pages = n_pages or sum(sorted(needed)[-max_batch:])
    for number, (T, n, pages) in enumerate(zip(map(len, prompts), ns, needed)):
        if T < 1 or n < 1 or T + n - 1 > n_ctx or pages > n_pages:
            raise ValueError(f"request {number}: can't generate n = {n} tokens after T = {T}: both "
                             f"must be at least 1, and T + n - 1 at most n_ctx = {n_ctx} and "
                             f"n_pages * page_size = {n_pages} * {page_size}")
    kv_caches = PagedKVCache(len(params["blocks"]), n_head, E // n_head, n_pages, page_size)
    serve(requests, kv_caches, params, n_head, max_batch, after_pass)
    return [np.array(request.ids[-n:]) for request, n in zip(requests, ns)]


def add_options(parser):
    for name, default, text in (("--n_pages", None, "pages in the pool (default: enough)"),
                                ("--page_size", 16, "positions in a page (default: 16)"),
                                ("--max_batch", 8, "requests in a pass (default: 8)")):
        parser.add_argument(name, type=utils.positive, default=default, metavar="N", help=text)


def main():
    with utils.command_line(__doc__, add_options=add_options) as job:
        settings, used = job.options, []          # pages in use, pass by pass
        try:
            new_ids = generate(job.prompts, job.params, job.n_head, job.n_tokens_to_generate,
                               settings.n_pages, settings.page_size, settings.max_batch,
                               lambda _, cache: used.append(cache.n_pages - len(cache.free)))
        except ValueError as error:
            job.error(str(error))
        job.print(new_ids)
        print(f"{len(used)} passes; at most {max(used)} pages in use at a time", file=sys.stderr)


if __name__ == "__main__":
    main()
