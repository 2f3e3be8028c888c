"""OpenAI's GPT-2 124M, if it is in models/124M: what published runs of it have said."""
import importlib

import numpy as np
import pytest

from conftest import ROOT
from hub import is_complete
from utils import load_encoder_hparams_and_params

pytestmark = pytest.mark.skipif(
    not is_complete(ROOT / "models" / "124M"),
    reason="needs OpenAI's weights; this fetches them: python gpt2_v3_kvcache.py --model 124M x")

# greedy continuations by picoGPT (its README; text) and by fastGPT (its README; token ids)
PICOGPT = ("Alan Turing theorized that computers would one day become",
           " the most powerful machines on the planet.\n\nThe computer is a machine that can perform "
           "complex calculations, and it can perform these calculations in a way that is very "
           "similar to the human brain.")
FASTGPT = ([36235, 39141, 18765, 1143, 326, 9061, 561, 530, 1110, 1716, 845, 3665, 11, 475, 772,
            339, 714, 407, 5967],
           [703, 484, 561, 307, 1498, 284, 466, 523, 13, 198, 198, 1, 40, 892, 326, 262, 749, 1593,
            1517, 318])


@pytest.fixture(scope="module")
def model():
    return load_encoder_hparams_and_params("124M")


@pytest.mark.parametrize("script", ["gpt2_v1", "gpt2_v2_padding", "gpt2_v3_kvcache",
                                    "gpt2_v4_prealloc"])
def test_published_continuations(model, script):
    encoder, hparams, params = model
    module = importlib.import_module(script)

    def generate(prompt, n):
        if script == "gpt2_v1":
            return module.generate(prompt, params, hparams["n_head"], n)
        [ids] = module.generate(*module.pad_batch([prompt]), params, hparams["n_head"], n)
        return ids

    text = encoder.decode(generate(encoder.encode(PICOGPT[0]), 40))
    assert text.startswith(PICOGPT[1])
    np.testing.assert_array_equal(generate(FASTGPT[0], 20), FASTGPT[1])
