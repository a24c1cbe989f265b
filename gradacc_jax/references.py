"""Gradients straight into the accumulator, during the backward pass.

``jax.vjp(...)[1].with_refs`` adds each cotangent into a mutable array as it is made:
no gradient tree exists beside the sums. With scanned layers the backward loop adds to
its slice of the stacked sum, where it would otherwise fill a second stack. The weight
is the cotangent of the loss, so nothing is multiplied afterwards either.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, use_abstract_mesh
import numpy as np

from gradacc_jax import precision

PyTree = Any


def serve(
    loss: Callable[[PyTree], PyTree], params: PyTree, total: PyTree, weighted: bool
) -> bool:
    """Whether cotangents of ``loss`` can be added into ``total`` in place, and rightly.

    Args:
      loss: the function of the parameters that will be differentiated.
      params: the parameters.
      total: the sums. They need the parameters' dtypes, which the cotangents have: a
        wider sum (float32 for bfloat16 parameters) needs the addition that casts.
      weighted: whether the weight is to be the loss's cotangent.
    """
    fits = jax.tree.map(
        lambda t, p: not precision.is_masked(t) and t.dtype == precision.dtype_of(p),
        total,
        params,
        is_leaf=precision.is_masked,
    )
    if not (all(jax.tree.leaves(fits)) and _work()):
        return False
    jaxpr = jax.make_jaxpr(loss)(params).jaxpr
    return _goes_in_once(jaxpr, set(jaxpr.invars)) and not (
        weighted and _minds_its_cotangent(jaxpr)
    )


def _goes_in_once(jaxpr: Any, held: set[Any]) -> bool:
    """Whether no parameter goes into one inner function (jit, scan, ...) twice.

    JAX 0.10 then adds one of the two cotangents only; later ones refuse some cases.
    """
    for equation in jaxpr.eqns:
        mine = [v for v in equation.invars if not hasattr(v, "val") and v in held]
        inner = list(core.jaxprs_in_params(equation.params))
        if inner and len(set(mine)) < len(mine):
            return False
        for one in inner:
            outer = equation.invars[len(equation.invars) - len(one.invars) :]
            same = len(outer) == len(one.invars)
            passed = {
                v
                for v, o in zip(one.invars, outer if same else one.invars, strict=True)
                if not same or (not hasattr(o, "val") and o in held)
            }
            if not _goes_in_once(one, passed):
                return False
    return True


def _minds_its_cotangent(jaxpr: Any) -> bool:
    """Whether the backward pass may not be w times that of 1 for a weight w.

    One that the user wrote may clip; one in float16 may overflow.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("custom_vjp"):
            return True
        if any(getattr(v.aval, "dtype", None) == jnp.float16 for v in equation.outvars):
            return True
        if any(map(_minds_its_cotangent, core.jaxprs_in_params(equation.params))):
            return True
    return any(v.aval.dtype == jnp.float16 for v in jaxpr.invars)


def add(vjp: Callable[..., Any], total: PyTree, cotangent: PyTree) -> PyTree:
    """``total + vjp(cotangent)``, without the second tree.

    Args:
      vjp: of a function of the parameters alone, as ``jax.vjp`` returns it.
      total: the sums, in the parameters' dtypes.
      cotangent: as for ``vjp``.

    Returns:
      The new sums. Memory: none, where ``total`` is given up; one gradient tree with
      jax 0.10 where a parameter is sliced outside a loop.
    """
    refs = jax.tree.map(jax.new_ref, total)
    try:
        vjp.with_refs(refs)(cotangent)  # type: ignore[attr-defined]
    except (TypeError, ValueError, NotImplementedError):
        # jax 0.10 cannot add to a static slice of a parameter (`p[0]`), and jax 0.12 to
        # references on a mesh with explicit axes that is not set. A fault of the loss's
        # own is raised again here. What was added so far is added to no one.
        (terms,) = vjp(cotangent)
        return jax.tree.map(jnp.add, total, terms)
    return jax.tree.map(jax.freeze, refs)


@functools.cache
def _work() -> bool:
    """A self-test: whether the installed JAX adds the right gradients.

    References are young, so this looks at what a transformer does: layers in a scan,
    rematerialised, a parameter used twice, one that is gathered from, one not used.
    """
    if not hasattr(jax, "new_ref"):
        return False

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w) + x, None

        x, _ = jax.lax.scan(layer, p["embedding"][jnp.array([0, 2, 0])], p["layers"])
        return jnp.mean((x @ p["embedding"].T) ** 2)

    params = {
        "embedding": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        "layers": np.linspace(-0.5, 0.5, 32, dtype=np.float32).reshape(2, 4, 4),
        "unused": np.ones(2, np.float32),
    }

    def both(p: PyTree) -> tuple[PyTree, PyTree]:
        _, vjp = jax.vjp(loss, p)
        one = jnp.ones((), jnp.float32)
        (expected,) = vjp(one)
        return expected, add(vjp, jax.tree.map(jnp.zeros_like, p), one)

    # Compiled ahead of time, a program runs now, even where a trace is under way, on
    # whatever mesh.
    with use_abstract_mesh(AbstractMesh((), ())):
        compiled = jax.jit(both).lower(params).compile()
        expected, found = jax.device_get(compiled(params))
    eps = np.finfo(np.float32).eps
    close = jax.tree.map(
        lambda a, b: np.allclose(a, b, rtol=100 * eps, atol=100 * eps), expected, found
    )
    return all(jax.tree.leaves(close))
