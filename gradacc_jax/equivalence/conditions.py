"""The conditions that every experiment runs under: float64, and still random numbers.

Two sums that are equal on paper differ by rounding, and two runs of a loss with dropout
by chance. Both are taken away before anything is compared:

- in float64 rounding is below 1e-12, and no fault is. It is switched on for the check
  alone, and runs on the CPU, where an accelerator has none;
- a *still* key is a key like any other, that gives the same number wherever it is asked
  for one. A loss with dropout is then a function of its examples, each treated alike.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend import random as extend
import jax.numpy as jnp
import numpy as np

from gradacc_jax import precision

PyTree = Any
# Where in [0, 1) every still uniform number lies: kept by a dropout of rate 0.5, and
# not the value at which anything is symmetric.
_STILL_AT = 0.4


class Tolerance(NamedTuple):
    """What counts as equal where numbers are computed in one dtype.

    Attributes:
      relative: the largest relative difference that rounding may make.
      floor: numbers smaller than this part of the largest are compared to that part:
        a gradient that is 0 on paper is rounding and nothing else.
    """

    relative: float
    floor: float


_TOLERANCES = {
    8: Tolerance(1e-9, 1e-3),
    4: Tolerance(1e-4, 0.1),
    2: Tolerance(0.1, 0.1),
    1: Tolerance(0.5, 0.5),
}


def tolerance(dtype: Any) -> Tolerance:
    return _TOLERANCES[min(np.dtype(dtype).itemsize, 8)]


@contextlib.contextmanager
def double() -> Iterator[None]:
    """float64 on the CPU, for the time of a ``with``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may name no CPU
            cpu = jax.local_devices(backend="cpu")[0]
            stack.enter_context(jax.default_device(cpu))
        yield


def widened(tree: PyTree) -> PyTree:
    """``tree`` on the host, with every floating number in double precision."""

    def leaf(x: Any) -> Any:
        if is_key(x):
            return x
        x = np.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return x.astype(np.complex128)
        return x.astype(np.float64) if precision.has_gradient(x) else x

    return jax.tree.map(leaf, tree)


def stilled(tree: PyTree) -> PyTree:
    """``tree`` with a still key for every key in it."""

    def leaf(x: Any) -> Any:
        if not is_key(x):
            return x
        data = jnp.zeros((*x.shape, 1), jnp.uint32)
        return jax.random.wrap_key_data(data, impl=_still())

    return jax.tree.map(leaf, tree)


def still_key() -> jax.Array:
    return jax.random.key(0, impl=_still())


def look(fun: Callable[..., Any], *args: Any) -> tuple[np.dtype, bool]:
    """Reads a function's program.

    Returns:
      The narrowest floating dtype that its arguments have or that it rounds to, and
      whether it draws random numbers from a key that is not still. A mask in float32
      rounds nothing: numbers are rounded where wider ones become narrow, and in
      products of matrices.
    """
    narrowest, draws = np.dtype(np.float64), False

    def narrowed(dtype: Any) -> np.dtype:
        floating = jnp.issubdtype(dtype, jnp.floating)
        narrow = floating and dtype.itemsize < narrowest.itemsize
        return np.dtype(dtype) if narrow else narrowest

    for leaf in jax.tree.leaves(args):
        narrowest = narrowed(precision.dtype_of(leaf))
    for equation in _equations(jax.make_jaxpr(fun)(*args).jaxpr):
        name = equation.primitive.name
        inputs: list[Any] = [getattr(v.aval, "dtype", None) for v in equation.invars]
        if name.startswith(("random_bits", "threefry", "rng_")):
            draws |= still_key().dtype not in inputs
        rounds = name in ("dot_general", "conv_general_dilated")
        if name == "convert_element_type":
            rounds = jnp.issubdtype(inputs[0], jnp.floating)
        results: list[Any] = [v.aval for v in equation.outvars] if rounds else []
        for aval in results:
            narrowest = narrowed(aval.dtype)
    return narrowest, draws


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def is_key(x: Any) -> bool:
    """Whether ``x`` is a typed PRNG key, or an array of them."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


@functools.cache
def _still() -> Any:
    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        return jnp.full(shape, int(_STILL_AT * 2**width), jnp.dtype(f"uint{width}"))

    return extend.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros((1,), jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
        random_bits=bits,
        fold_in=lambda key, data: key,
        name="still",
        tag="stl",
    )
