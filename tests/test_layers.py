"""The small functions, on values that PyTorch 2.13 gave; the four scripts share their code."""
import numpy as np
import pytest

import gpt2_v1
import gpt2_v2_padding
import gpt2_v3_kvcache
import gpt2_v4_prealloc

SCRIPTS = [gpt2_v1, gpt2_v2_padding, gpt2_v3_kvcache, gpt2_v4_prealloc]


def array(*values):
    return np.array(values, dtype=np.float32)


def assert_close(actual, expected):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("module", SCRIPTS)
def test_gelu(module):
    """torch.nn.functional.gelu(x, approximate="tanh"); large values do not overflow."""
    x = array(-100, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 100)
    with np.errstate(all="raise", under="ignore"):
        assert_close(module.gelu(x), [0, 0, -0.0036374331, -0.15880799, -0.154286, 0, 0.345714,
                                      0.84119201, 2.9963627, 10, 100])
    np.testing.assert_array_equal(x, array(-100, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 100))


@pytest.mark.parametrize("module", SCRIPTS)
def test_softmax(module):
    """torch.softmax(x, -1); a masked score leaves nothing, and a large one does not overflow."""
    x = array(1, 2, 3)
    assert_close(module.softmax(x), [0.09003057, 0.24472848, 0.66524094])
    np.testing.assert_array_equal(x, [1, 2, 3])   # the argument is left alone
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(module.softmax(array([1000, 1000], [5, 5 - 1e10])),
                                      [[0.5, 0.5], [1, 0]])


@pytest.mark.parametrize("module", SCRIPTS)
def test_layer_norm(module):
    """torch.nn.functional.layer_norm(x, (4,), g, b), with its eps of 1e-5"""
    x, g, b = array(1, 2, 3, 10), array(1, 2, 1, 1), array(0, 0, 1, 0)
    assert_close(module.layer_norm(x, g, b), [-0.84852779, -1.1313704, 0.71715736, 1.6970556])
    near_constant = array(1, 1.01, 1, 1.01)       # a variance of 2.5e-5, where eps shows
    assert_close(module.layer_norm(near_constant, array(1, 1, 1, 1), array(0, 0, 0, 0)),
                 [-0.84515425, 0.84515425, -0.84515425, 0.84515425])


@pytest.mark.parametrize("module", SCRIPTS)
def test_linear(module):
    """x @ w + b, with w stored [in, out]"""
    x, w, b = array([1, 2], [3, 4]), array([1, 0, 2], [0, 1, 3]), array(10, 20, 30)
    expected = [[11, 22, 38], [13, 24, 48]]
    np.testing.assert_array_equal(module.linear(x, w, b), expected)
    if module is not gpt2_v1:
        np.testing.assert_array_equal(module.linear(x[:, None], w, b), np.array(expected)[:, None])
