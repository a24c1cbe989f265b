"""Random numbers that compile quickly: these tests compile many small models."""

import jax
import pytest


@pytest.fixture(autouse=True)
def keys_that_compile_quickly():
    with jax.default_prng_impl("unsafe_rbg"):
        yield
