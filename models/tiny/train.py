"""Make models/tiny: a byte-level BPE tokenizer and a small GPT-2, trained from scratch.

    python models/tiny/train.py fairy_tales.txt --out models/tiny

The text is any UTF-8 file whose documents are separated by a line `<|endoftext|>`. One
document in fifty is held out. There are three stages:

1. the tokenizer: GPT-2's byte-level BPE, `<|endoftext|>` last;
2. the model: next-token prediction for --minutes of wall-clock time, Muon (Jordan et al.
   2024) for the matrices of the blocks and AdamW for the rest;
3. --unloop_minutes of sequence-level unlikelihood training (Welleck et al. 2019), because
   a small model that decodes greedily repeats itself: it decodes, and every token that
   completes an 8-gram it has already written is made less likely.

Stage 2 keeps the model with the lowest held-out loss in --out; stage 3 starts from it, and
replaces it at the end. Weights are float16, in Hugging Face layout. This script is not part
of the product, and needs packages of its own; it ran with torch 2.13.0, transformers 5.24.0
and tokenizers 0.23.3.
"""
import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 50
REPEATED_NGRAM = 8
PROMPTS = [
    "Once upon a time",
    "There was once a king who had three sons",
    "The old woman said to the boy",
    "In the middle of the forest",
]


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="the training text")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--resume", action="store_true",
                        help="go on from the tokenizer and the model in --out")
    parser.add_argument("--minutes", type=float, default=90,
                        help="stage 2; 0 leaves it out (default: 90)")
    parser.add_argument("--unloop_minutes", type=float, default=6,
                        help="stage 3; 0 leaves it out (default: 6)")
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--n_ctx", type=int, default=512)
    parser.add_argument("--n_embd", type=int, default=256)
    parser.add_argument("--n_head", type=int, default=4)
    parser.add_argument("--n_layer", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--adamw_rate", type=float, default=6e-3)
    parser.add_argument("--muon_rate", type=float, default=0.02)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--unloop_rate", type=float, default=1e-4)
    parser.add_argument("--unloop_weight", type=float, default=0.3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"can't read {options.text}: {error}")
    options.documents = text.rstrip("\n").split(f"\n{END_OF_TEXT}\n")
    if len(options.documents) < HELD_OUT_EVERY:
        parser.error(f"{options.text} holds {len(options.documents)} documents; training "
                     f"needs {HELD_OUT_EVERY}, separated by a line {END_OF_TEXT}")
    return options


def train_tokenizer(options):
    """Write vocab.json and merges.txt to options.out."""
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    # the trainer would give a special token the id 0, GPT-2's is the last: add it here
    tokenizer.train_from_iterator(
        options.documents, vocab_size=options.vocab_size - 1, min_frequency=2)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_model(str(options.out))
    path = options.out / "vocab.json"
    vocab = json.loads(path.read_text(encoding="utf-8"))
    vocab[END_OF_TEXT] = len(vocab)
    path.write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")


class Corpus:
    """The token ids of a text: training windows at random, held-out windows in order."""

    def __init__(self, options):
        self.tokenizer = ByteLevelBPETokenizer(
            str(options.out / "vocab.json"), str(options.out / "merges.txt"))
        self.end = self.tokenizer.token_to_id(END_OF_TEXT)
        self.window = options.n_ctx
        self.generator = torch.Generator().manual_seed(0)
        train, held_out, self.starts = [], [], []
        for number, encoded in enumerate(self.tokenizer.encode_batch(options.documents)):
            if number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2:
                held_out += encoded.ids + [self.end]
            else:
                self.starts.append(len(train))
                train += encoded.ids + [self.end]
        if min(len(train), len(held_out)) < self.window:
            raise SystemExit(f"the text is too short: {len(train)} tokens to train on and "
                             f"{len(held_out)} held out, --n_ctx is {self.window}")
        self.train = torch.tensor(train)
        whole = len(held_out) // self.window * self.window
        self.held_out = torch.tensor(held_out[:whole]).view(-1, self.window)

    def random_below(self, limit):
        return int(torch.randint(limit, (), generator=self.generator))

    def batch(self, n):
        """[n, window] random windows; one in eight begins where a document begins."""
        offsets = []
        for _ in range(n):
            offset = self.random_below(len(self.train) - self.window + 1)
            if self.random_below(8) == 0:
                start = self.starts[self.random_below(len(self.starts))]
                offset = min(start, len(self.train) - self.window)
            offsets.append(offset)
        return torch.stack([self.train[o:o + self.window] for o in offsets])

    def prompts(self, n):
        """[n, 3 to 13] beginnings, five in eight of them the beginning of a document."""
        length = 3 + self.random_below(11)
        offsets = [self.starts[self.random_below(len(self.starts))] if row % 8 < 5
                   else self.random_below(len(self.train) - length) for row in range(n)]
        offsets = [min(o, len(self.train) - length) for o in offsets]
        return torch.stack([self.train[o:o + length] for o in offsets])


def new_model(corpus, options):
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=corpus.tokenizer.get_vocab_size(), n_positions=options.n_ctx,
        n_embd=options.n_embd, n_layer=options.n_layer, n_head=options.n_head,
        # PyTorch's fused attention on the CPU can't drop attention weights
        resid_pdrop=options.dropout, embd_pdrop=options.dropout, attn_pdrop=0.0,
        bos_token_id=corpus.end, eos_token_id=corpus.end))


def load(options):
    """The model in --out, in float32, with the dropout of the options."""
    return GPT2LMHeadModel.from_pretrained(
        options.out, dtype=torch.float32, resid_pdrop=options.dropout, embd_pdrop=options.dropout)


def save(model, out):
    """Write config.json and model.safetensors, in float16."""
    half = copy.deepcopy(model).half()
    half.config.resid_pdrop = half.config.embd_pdrop = 0.0
    half.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "model.safetensors").chmod(0o644)


def make_optimizers(model, options):
    parameters = dict(model.named_parameters())
    matrices = [p for n, p in parameters.items() if p.dim() == 2 and ".h." in n]
    embeddings = [p for n, p in parameters.items() if p.dim() == 2 and ".h." not in n]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    return [
        torch.optim.Muon(matrices, lr=options.muon_rate, weight_decay=options.weight_decay,
                         momentum=0.95, nesterov=True),
        torch.optim.AdamW([{"params": embeddings, "weight_decay": 0.01},
                           {"params": vectors, "weight_decay": 0.0}],
                          lr=options.adamw_rate, betas=(0.9, 0.95), fused=True)]


@torch.no_grad()
def held_out_loss(model, corpus):
    """Mean negative log-likelihood, nats a token, over the held-out windows."""
    model.eval()
    total = 0.0
    for chunk in corpus.held_out.split(8):
        total += model(chunk, labels=chunk).loss.item() * len(chunk)
    model.train()
    return total / len(corpus.held_out)


def train(model, corpus, options):
    """Next-token prediction; leaves the model with the lowest held-out loss in options.out."""
    optimizers = make_optimizers(model, options)
    groups = [g for optimizer in optimizers for g in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]

    @torch.compile
    def training_loss(ids):
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, labels=ids).loss

    model.train()
    best = held_out_loss(model, corpus)
    started, step, progress, running = time.time(), 0, 0.0, None
    while progress < 1:
        # the schedule follows the clock: 100 steps of warm-up, then a cosine down to 1%
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
        for group, peak in zip(groups, peaks):
            group["lr"] = peak * cosine * min(1.0, (step + 1) / 100)
        loss = training_loss(corpus.batch(options.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        seconds = time.time() - started
        progress = min(1.0, seconds / (60 * options.minutes))
        if step % 200 == 0 or progress == 1:
            held_out = held_out_loss(model, corpus)
            rate = step * options.batch * options.n_ctx / seconds
            print(f"{seconds / 60:5.1f} min  step {step:5d}  training {running:.3f}  "
                  f"held out {held_out:.3f}  {rate:,.0f} tokens/s", flush=True)
            if held_out < best:
                best = held_out
                save(model, options.out)


@torch.no_grad()
def decode(model, ids, count):
    """Greedy: ids [B, T] -> [B, T + count]."""
    model.eval()
    next_ids, cache = ids, None
    for _ in range(count):
        out = model(next_ids, past_key_values=cache, use_cache=True)
        next_ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        ids = torch.cat([ids, next_ids], dim=1)
    model.train()
    return ids


def repeated(ids, end):
    """[B, T] float: 1 where a token completes an n-gram already in its row."""
    mask = torch.zeros(ids.shape)
    for row, tokens in enumerate(ids.tolist()):
        seen = set()
        for stop in range(REPEATED_NGRAM, len(tokens) + 1):
            ngram = tuple(tokens[stop - REPEATED_NGRAM:stop])
            if ngram[-1] == end:
                break
            mask[row, stop - 1] = ngram in seen
            seen.add(ngram)
    return mask


def unloop(model, corpus, options):
    """Next-token prediction, plus -log(1 - p) of each token that completes a repetition."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.unloop_rate, betas=(0.9, 0.95), weight_decay=0.0)
    started, step, progress = time.time(), 0, 0.0
    while progress < 1:
        optimizer.param_groups[0]["lr"] = (
            options.unloop_rate * (1 - progress) * min(1.0, (step + 1) / 10))
        ids = decode(model, corpus.prompts(16), 120)
        mask = repeated(ids, corpus.end)[:, 1:]
        batch = corpus.batch(options.batch)
        with torch.autocast("cpu", torch.bfloat16):
            likelihood = model(batch, labels=batch).loss
            logits = model(ids[:, :-1]).logits
        chosen = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        penalty = -torch.log1p(-chosen.exp().clamp(max=0.9999))
        unlikelihood = (penalty * mask).sum() / mask.sum().clamp(min=1)
        (likelihood + options.unloop_weight * unlikelihood).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        seconds = time.time() - started
        progress = min(1.0, seconds / (60 * options.unloop_minutes))
        if step % 15 == 0 or progress == 1:
            print(f"{seconds / 60:5.1f} min  step {step:5d}  training {likelihood:.3f}  "
                  f"repeated {mask.mean():.3f}", flush=True)
    print(f"held out {held_out_loss(model, corpus):.3f}")
    save(model, options.out)


def main():
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if not options.resume:
        train_tokenizer(options)
    corpus = Corpus(options)
    model = load(options) if options.resume else new_model(corpus, options)
    print(f"{model.num_parameters():,} parameters, {corpus.train.numel():,} training and "
          f"{corpus.held_out.numel():,} held-out tokens", flush=True)
    if options.minutes:
        train(model, corpus, options)
        model = load(options)                     # the best of them
    if options.unloop_minutes:
        unloop(model, corpus, options)
    for prompt in PROMPTS:
        ids = torch.tensor([corpus.tokenizer.encode(prompt).ids])
        print("-", corpus.tokenizer.decode(decode(model, ids, 100)[0].tolist()))


if __name__ == "__main__":
    main()
