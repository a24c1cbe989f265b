"""Running statistics on micro-batches: the horizon, counted in examples, is kept."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from gradacc_jax import rescale_momentum

EPS = float(np.finfo(np.float64).eps)


@hypothesis.given(st.floats(1e-3, 1) | st.just(0.0), st.integers(1, 64))
def test_k_updates_keep_of_the_old_value_what_one_did(momentum, k):
    old, kept = 1.0, rescale_momentum(momentum, k)
    for _ in range(k):
        old = kept * old
    # The exponent (times log(m), at most 7), the root and k products are each rounded.
    np.testing.assert_allclose(old, momentum, rtol=(2 * k + 7) * EPS)


def test_statistics_of_constant_micro_batches_are_those_of_the_whole_batch():
    whole = 0.9 * 5.0 + 0.1 * 2.0
    mean, momentum = 5.0, rescale_momentum(0.9, 4)
    for _ in range(4):
        mean = momentum * mean + (1 - momentum) * 2.0
    np.testing.assert_allclose(mean, whole, rtol=8 * EPS)


@pytest.mark.parametrize("momentum", [-0.1, 1.1, float("nan"), np.ones(2)])
def test_a_momentum_outside_the_unit_interval_is_refused(momentum):
    with pytest.raises(ValueError, match=r"is not in \[0, 1\]"):
        rescale_momentum(momentum, 4)


@pytest.mark.parametrize("k", [0, -1, 2.0, True, None])
def test_a_number_of_micro_batches_below_one_is_refused(k):
    with pytest.raises(ValueError, match="choose at least 1"):
        rescale_momentum(0.9, k)
