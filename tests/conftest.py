"""What every test runs under: eight CPU devices, and no silent promotion in our code.

All of it is set before JAX makes its first array.
"""

import os

# A machine with an accelerator runs these tests on its CPU, unless told otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time goes into machine code that runs once. What is counted here
# (copies, temporaries, collectives, FLOPs) is decided before that, by XLA's own passes.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
)

import hypothesis
import jax
import pytest

# By jax.config and not by XLA_FLAGS, so that the programs that tests start (the command
# `gradacc`) see the one CPU device that a user has.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests count copies and temporaries of what the compiler makes now, not of what a cache
# kept from another day.
jax.config.update("jax_enable_compilation_cache", False)

# Compiling takes as long as it takes, so no deadlines. CI draws the same examples every
# time; at home each run looks further.
hypothesis.settings.register_profile("home", deadline=None, max_examples=25)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=25, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "home")


@pytest.fixture(autouse=True)
def strict_dtype_promotion(request):
    """Makes int32 + float32 and bfloat16 + float32 errors: how a silent cast shows.

    optax itself relies on such promotions: adam computes 0.9 ** count, MultiSteps
    multiplies by a boolean. An inner optimizer is let off alone by ``tests.lenient``; a
    test of optax's own code, or of what users write around it, is marked
    ``optax_promotes``.
    """
    lenient = request.node.get_closest_marker("optax_promotes")
    with jax.numpy_dtype_promotion("standard" if lenient else "strict"):
        yield
