"""With rematerialisation and without it: the same numbers, whatever the policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax import policies, remat
from tests.checkpointing.models import PROGRAMS, quick

POLICIES = {
    "full": policies.full,
    "none": policies.none,
    "dots": policies.dots,
    "no batch dims": policies.dots_with_no_batch_dims,
    "names": policies.save_names("hidden"),
    "all but": policies.save_all_but("hidden"),
    "offload": policies.offload_names("hidden"),
    "union": policies.dots | policies.regex("hid.*"),
}


# The slow ones are all but the extremes.
CASES = [
    pytest.param(dtype, name, marks=() if name in quickly else pytest.mark.slow)
    for dtype, quickly in (("float32", ("full", "all but")), ("bfloat16", ("full",)))
    for name in POLICIES
]


def run(kind, dtype, scan, wrap):
    # Flax's own layers promote.
    with jax.numpy_dtype_promotion("standard" if kind != "function" else "strict"):
        loss, params = PROGRAMS[kind](wrap, dtype, scan)
        step = jax.value_and_grad(loss, has_aux=True)
        (value, state), grads = quick(step, params)
    return params, value, grads, state


@functools.cache
def without(kind, dtype, scan):
    return run(kind, dtype, scan, lambda block: block)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize(("dtype", "policy"), CASES)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_values_gradients_state_and_masks_do_not_depend_on_the_policy(
    kind, dtype, scan, policy
):
    wrap = remat(policy=POLICIES[policy])
    expected = without(kind, dtype, scan)
    found = run(kind, dtype, scan, wrap)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    # XLA fuses differently, and keeps excess precision within a fusion: some units in
    # the last place of the largest number of a leaf.
    tolerance = 1e-6 if dtype == "float32" else 8 * float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        if expected_exactly(b):
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, atol=tolerance * max(1, abs(b).max()))


def expected_exactly(x):
    """Masks, counts, keys and their data."""
    return np.array_equal(x, np.round(x))
