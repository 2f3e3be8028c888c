"""Beyond version 4: keys and values in 8 bits, so that the cache is little more than a quarter.

Each value is divided by a scale and rounded to one of the numbers that a byte can say; who reads it
gets that number times the scale. INT8 has the whole numbers from -127 to 127. FP8 E4M3 has a sign
bit, 4 bits of exponent and 3 of mantissa: close together near 0, far apart at the largest, 448.

The scale turns the largest value into the largest number. One scale for each position of each head
always fits. One for the whole head is made from the first pass, the prompt's first 256 columns with
their padding, and has to do for all that comes later: larger values saturate, smaller are coarse.

What it saves: memory; and time, on hardware that reads 8 bits and widens them on the way.
What it costs: precision; and in NumPy time too: each step writes out the whole past as float32.
Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; Sheng et al. 2023, "FlexGen".

Shapes: B batch, T new, S cached + new positions, H heads, D head_dim.
"""
import utils  # first: a Ctrl-C while NumPy is being imported is quiet, too
import sys

import numpy as np

import gpt2_v4_prealloc
from gpt2_v4_prealloc import KVCache, kv_cache_bytes, pad_batch

LARGEST = {"fp8": 448, "int8": 127}           # what dtype may be -> its largest number


def e4m3_table():
    """What the 256 codes of E4M3 stand for, float32 [256]; the first bit of a code is the sign."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6,         # subnormal, down to 0
                      (1 + mantissa) * 2.0**(exponent - 7))      # the bias is 7
    values[127] = np.nan                                         # all bits 1: NaN, the only one
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = e4m3_table()
MIDPOINTS = (E4M3[:126] + E4M3[1:127]) / 2                       # [126], between 0 and 448


def encode(x, dtype):
    """The codes of the numbers nearest to x: of two, the even one; what is too large saturates."""
    if dtype == "int8":
        return np.clip(np.rint(x), -127, 127).astype(np.int8)
    lower = np.searchsorted(MIDPOINTS, np.abs(x), side="left")
    upper = np.searchsorted(MIDPOINTS, np.abs(x), side="right")  # another one if x is a midpoint
    code = np.where(lower % 2 == 0, lower, upper)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def decode(codes, scales, dtype):
    """What the codes stand for, times their scales, float32."""
    return (np.take(E4M3, codes) if dtype == "fp8" else codes.astype(np.float32)) * scales


class QuantizedKVCache(KVCache):
    """A KVCache of codes, with scales [n_layer, B, H, capacity, 1], or [n_layer, B, H, 1, 1]."""

    def __init__(self, n_layer, batch, n_head, capacity, head_dim, dtype="fp8", scales="position"):
        if dtype not in LARGEST or scales not in ("head", "position"):
            raise ValueError(f"dtype = {dtype!r} must be 'fp8' or 'int8', and scales = {scales!r} "
                             f"'head' or 'position'")
        super().__init__(n_layer, batch, n_head, capacity, head_dim,
                         np.uint8 if dtype == "fp8" else np.int8)
        self.dtype, self.per_position = dtype, scales == "position"
        n_scales = capacity if self.per_position else 1
        self.key_scales = np.empty((n_layer, batch, n_head, n_scales, 1), np.float32)
        self.value_scales = np.empty_like(self.key_scales)

    def scales_of(self, x):
        """Scales that fit x [B, H, T, D]: [B, H, T, 1] per position, [B, H, 1, 1] per head."""
        largest = np.abs(x).max(axis=-1 if self.per_position else (-2, -1), keepdims=True)
        scales = largest / LARGEST[self.dtype]
        return np.where(scales > 0, scales, np.float32(1))       # all 0: any scale will do

    def update(self, layer, k, v):
        """Append the codes of k and v [B, H, T, D]; return all so far, decoded, [B, H, S, D].

        ValueError, with nothing written, if they don't match the cache or exceed its capacity.
        """
        key_scales, value_scales = self.key_scales[layer], self.value_scales[layer]
        if not k.shape[:2] == v.shape[:2] == key_scales.shape[:2]:
            raise ValueError(f"k {k.shape} and v {v.shape} don't fit {self.keys.shape[1:]}")
        start = self.lengths[layer]
        if self.per_position or start == 0:
            k_scales, v_scales = self.scales_of(k), self.scales_of(v)
        else:
            k_scales, v_scales = key_scales, value_scales
        keys, values = super().update(layer, encode(k / k_scales, self.dtype),
                                      encode(v / v_scales, self.dtype))
        end = self.lengths[layer]
        new = slice(start, end) if self.per_position else slice(1)
        key_scales[:, :, new], value_scales[:, :, new] = k_scales, v_scales
        return (decode(keys, key_scales[:, :, :end], self.dtype),
                decode(values, value_scales[:, :, :end], self.dtype))

    @property
    def nbytes(self):
        """Bytes allocated: one a value, four a scale."""
        return super().nbytes + self.key_scales.nbytes + self.value_scales.nbytes


def new_cache(input_ids, params, n_head, n_tokens_to_generate, dtype, scales):
    """A cache for T + n - 1 positions, at most n_ctx: what is too long, generate refuses."""
    (B, T), (n_ctx, E) = input_ids.shape, params["wpe"].shape
    capacity = min(max(T + n_tokens_to_generate - 1, 0), n_ctx)
    return QuantizedKVCache(len(params["blocks"]), B, n_head, capacity, E // n_head, dtype, scales)


def generate(input_ids, attention_mask, params, n_head, n_tokens_to_generate, dtype="fp8",
             scales="position"):
    """Version 4's, with a cache of dtype "fp8" or "int8" and scales per "head" or "position"."""
    kv_caches = new_cache(input_ids, params, n_head, n_tokens_to_generate, dtype, scales)
    return gpt2_v4_prealloc.generate(input_ids, attention_mask, params, n_head,
                                     n_tokens_to_generate, kv_caches)


def add_options(parser):
    parser.add_argument("--dtype", choices=["fp8", "int8"], default="fp8",
                        help="the format of a value (default: fp8)")
    parser.add_argument("--scales", choices=["head", "position"], default="position",
                        help="a scale for each head, or for each position too (default: position)")


def main():
    with utils.command_line(__doc__, add_options=add_options) as job:
        batch, n = pad_batch(job.prompts), job.n_tokens_to_generate
        kv_caches = new_cache(batch[0], job.params, job.n_head, n, job.options.dtype,
                              job.options.scales)
        job.print(gpt2_v4_prealloc.generate(*batch, job.params, job.n_head, n, kv_caches))
        n_layer, B, H, capacity, D = kv_caches.keys.shape
        print(f"the cache took {kv_caches.nbytes:,} bytes; in float32 it takes "
              f"{kv_cache_bytes(n_layer, B, capacity, H, D):,}", file=sys.stderr)


if __name__ == "__main__":
    main()
