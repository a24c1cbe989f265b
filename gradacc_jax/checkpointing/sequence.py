r"""Layers in a row, in segments: memory of about the square root of their number.

A layer is rematerialised by keeping its input; of N layers, that is N inputs. Here the
layers are cut into segments, and only the inputs of the segments are kept. The backward
pass computes one segment again at a time, last one first, and holds what its layers
keep. With S segments of N/S layers, an input of b bytes and a layer that keeps r bytes,

.. math::
    M(S) = S \cdot b + \frac{N}{S} \cdot r, \qquad
    \min_S M(S) = 2 \sqrt{N \, b \, r} \quad\text{at}\quad S = \sqrt{N \, r / b},

and every layer is computed once more, and no layer twice: inside a segment that is
computed again, all is kept. (T. Chen et al., *Training Deep Nets with Sublinear Memory
Cost*, arXiv:1604.06174.) Which is why a layer's r matters: a transformer's block keeps
ten or twenty times its input, so that 12 blocks are best kept one by one, and 512 in
segments of a few.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import math
import operator
import sys
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.policies import Policy
from gradacc_jax.checkpointing.regions import num_bytes, region
from gradacc_jax.checkpointing.remat import remat
from gradacc_jax.checkpointing.residuals import kept_bytes

PyTree = Any
Layer = Callable[..., PyTree]


def remat_sequence(
    layers: Any,
    x: PyTree,
    *,
    stacked: PyTree = None,
    segments: int | str = "sqrt",
    policy: Any = "full",
) -> PyTree:
    r"""Runs layers one after the other, and keeps little of them for the backward pass.

    The result is that of ``for layer in layers: x = layer(x)``; so are the gradients,
    dropout masks, batch statistics and sown values.

    With ``stacked``, that of ``lax.scan(lambda x, p: (layers(x, p), None), x,
    stacked)[0]``: one function, and parameters with a leading axis for the layers. The
    program is then of one size for any number of layers.

    Args:
      layers: a list of layers, each ``x -> x``: functions, linen modules (inside their
        parent's methods, or bound by ``module.bind``) or nnx modules. With ``stacked``,
        the body ``body(x, layer_params) -> x``, a pure function.
      x: the first layer's input, any pytree.
      stacked: the parameters of all layers, a pytree (an nnx module is one) whose
        leaves have the same leading axis.
      segments: into how many segments to cut N layers, at most: they are of ⌈N/S⌉
        layers, and the last one may be shorter. ``"sqrt"`` finds the number that needs
        the least memory, by tracing the layers' shapes; where a layer keeps as much as
        its input is, it is √N. N is each layer on its own.
      policy: what is kept of a segment besides its input until the backward pass is
        there. ``"full"``: nothing. ``"dots"``: the matrix products of all layers;
        memory is then that of ``"dots"`` for each layer. ``"none"``: everything, as
        without this function. *While* a segment is computed again, all is kept.

    Returns:
      The last layer's output.

      Memory: the segments' inputs, and what one segment's
      layers keep. With ``stacked`` also the parameters and gradients of one segment,
      and where S does not divide N, those of the last, shorter one. Time: one forward
      pass more, in the backward pass.

    Raises:
      TypeError: for layers that cannot be called.
      ValueError: for a number of segments that is none, leading axes that differ, and
        linen modules without parameters.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from gradacc_jax import remat_sequence
      >>> def layer(x, w):
      ...     return jnp.tanh(w * x)
      >>> w = jnp.linspace(0.9, 1.1, 31)
      >>> def loss(w, x):
      ...     return jnp.sum(remat_sequence(layer, x, stacked=w))
      >>> def plain(w, x):
      ...     return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])
      >>> x = jnp.array([0.5, 1.0])
      >>> print(jnp.allclose(jax.grad(loss)(w, x), jax.grad(plain)(w, x)))
      True
    """
    policy = policies.resolve(policy)
    _check_segments(segments)
    if stacked is None:
        return _list(_checked(layers), x, segments, policy)
    if not callable(layers):
        raise TypeError(
            f"layers={type(layers).__name__} with stacked=...; expected one function "
            "body(x, layer_params) -> x for all layers"
        )
    return _stacked(layers, x, stacked, segments, policy)


def _list(layers: list[Any], x: PyTree, segments: int | str, policy: Policy) -> PyTree:
    if policy == policies.none or not layers or _initializing(layers):
        return _run(layers, x)
    if isinstance(segments, str):
        segments = _sqrt_of_list(layers, x)
    size = math.ceil(len(layers) / segments)
    for start in range(0, len(layers), size):
        x = _segment(layers[start : start + size], x, policy)
    return x


def _stacked(
    body: Layer, x: PyTree, stacked: PyTree, segments: int | str, policy: Policy
) -> PyTree:
    def steps(x: PyTree, params: PyTree) -> PyTree:
        return lax.scan(lambda x, p: (body(x, p), None), x, params)[0]

    def again_of(fun: Layer) -> Layer:
        return region(fun, policy, prevent_cse=True, where="the body of remat_sequence")

    num = _num_layers(stacked)
    if policy == policies.none or num == 0:
        return steps(x, stacked)
    if isinstance(segments, str):
        segments = _sqrt_of_stacked(body, x, stacked, num)
    size = math.ceil(num / segments)
    if size == 1:
        again = again_of(body)
        return lax.scan(lambda x, p: (again(x, p), None), x, stacked)[0]
    if num % size == 0:
        # Another shape of the same array: nothing is copied.
        parts = jax.tree.map(
            lambda a: jnp.reshape(a, (num // size, size, *a.shape[1:])), stacked
        )
        again = again_of(steps)
        return lax.scan(lambda x, p: (again(x, p), None), x, parts)[0]

    # Cutting the parameters in two, for two loops, would copy all of them, and all of
    # their gradients. So the loop takes its parameters from where they are.
    def segment(x: PyTree, start: Any, stacked: PyTree) -> PyTree:
        return steps(x, _rows(stacked, start, size))

    def tail(x: PyTree, stacked: PyTree) -> PyTree:
        return steps(x, _rows(stacked, num - num % size, num % size))

    again = again_of(segment)
    starts = size * jnp.arange(num // size)
    x, _ = lax.scan(lambda x, start: (again(x, start, stacked), None), x, starts)
    return again_of(tail)(x, stacked)


def _rows(stacked: PyTree, start: Any, size: int) -> PyTree:
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), stacked)


# --- segments of a list, of functions and of modules ----------------------------------


def _run(layers: Iterable[Layer], x: PyTree) -> PyTree:
    for layer in layers:
        x = layer(x)
    return x


def _segment(layers: list[Any], x: PyTree, policy: Policy) -> PyTree:
    """One segment. Modules go in as arguments, so that what they hold is lifted."""
    are_modules = [_is_linen(layer) or _is_nnx(layer) for layer in layers]
    modules = [layer for layer, m in zip(layers, are_modules) if m]

    def segment(*modules_and_x: Any) -> PyTree:
        *modules, x = modules_and_x
        left = iter(modules)
        return _run([next(left) if m else f for f, m in zip(layers, are_modules)], x)

    with _explained():
        return remat(segment, policy=policy)(*modules, x)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        of_flax = ("JaxTransformError", "TraceContextError", "UnexpectedTracerError")
        if type(error).__name__ in of_flax:
            error.add_note(
                "remat_sequence: if a function in `layers` runs a Flax module that is "
                "not its own, put the module itself into the list, or write a function "
                "of its parameters, lambda x: module.apply(variables, x)"
            )
        raise


def _checked(layers: Any) -> list[Layer]:
    if isinstance(layers, str | Mapping) or not isinstance(layers, Iterable):
        raise TypeError(
            f"layers={type(layers).__name__}; expected a list of layers, or a function "
            "body(x, layer_params) together with stacked=params"
        )
    layers = list(layers)
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(
                f"layers[{i}] is a {type(layer).__name__}; expected a function or a "
                "module, x -> x"
            )
        if _is_linen(layer) and layer.scope is None:
            raise ValueError(
                f"layers[{i}] is a linen module without parameters; call "
                "remat_sequence in a method of the module that holds it, or pass "
                "module.bind(variables)"
            )
    kinds = {_is_linen(layer) for layer in layers if _is_linen(layer) or _is_nnx(layer)}
    if len(kinds) > 1:
        raise TypeError(
            "layers holds linen modules and nnx modules; convert one kind by nnx.bridge"
        )
    return layers


def _check_segments(segments: Any) -> None:
    if isinstance(segments, str):
        if segments != "sqrt":
            raise ValueError(
                f'segments={segments!r} is not known; choose "sqrt" or a number'
            )
        return
    try:
        number = operator.index(segments)
    except TypeError:
        number = 0
    if number < 1 or isinstance(segments, bool):
        raise ValueError(
            f'segments={segments!r} is no number of segments; choose "sqrt" or an '
            "integer, at least 1"
        )


def _num_layers(stacked: PyTree) -> int:
    lengths = {
        jax.tree_util.keystr(path): jnp.shape(leaf)[:1]
        for path, leaf in jax.tree_util.tree_leaves_with_path(stacked)
    }
    if not lengths or () in lengths.values() or len({*lengths.values()}) > 1:
        found = ", ".join(
            f"{k}: {v[0] if v else 'a scalar'}" for k, v in lengths.items()
        )
        raise ValueError(
            "the leaves of stacked do not have one leading axis for the layers "
            f"({found or 'there are none'}); stack the layers' parameters by "
            "jax.tree.map(lambda *p: jnp.stack(p), *layers)"
        )
    ((num,),) = {*lengths.values()}
    return num


# --- the number of segments -----------------------------------------------------------


def best_segments(num: int, input_bytes: float, layer_bytes: float) -> int:
    """The number of segments with the least memory.

    Near the least, a number that divides ``num`` is better, since a loop over stacked
    parameters then needs no second loop for the rest.

    Args:
      num: the number of layers.
      input_bytes: what a segment's input holds.
      layer_bytes: what a layer keeps.
    """

    def memory(segments: int) -> float:
        size = math.ceil(num / segments)
        # In a loop over layers, one more is at work while the others are stacked.
        at_once = size + 1 if size > 1 else 1
        return math.ceil(num / size) * input_bytes + at_once * layer_bytes

    numbers = range(1, num + 1)
    close = 1.05 * min(map(memory, numbers))
    return min(
        (s for s in numbers if memory(s) <= close),
        key=lambda s: (num % s > 0, memory(s)),
    )


def _sqrt_of_list(layers: list[Layer], x: PyTree) -> int:
    functions, variables = zip(*map(_functional, layers))

    def chain(x: PyTree, *variables: PyTree) -> PyTree:
        for function, held in zip(functions, variables):
            x = function(x, held)
        return x

    with _explained():
        # What functions close over is differentiated too.
        converted, consts = jax.closure_convert(chain, x, *variables)
        kept = kept_bytes(converted, x, *variables, *consts, counted=(0,))
    return best_segments(len(layers), num_bytes(jax.tree.leaves(x)), kept / len(layers))


def _sqrt_of_stacked(body: Layer, x: PyTree, stacked: PyTree, num: int) -> int:
    first = jax.tree.map(lambda a: a[0], stacked)  # used for its shapes alone
    converted, consts = jax.closure_convert(body, x, first)
    kept = kept_bytes(converted, x, first, *consts, counted=(0,))
    # A segment's parameters are taken out of the stack, and its gradients put there.
    return best_segments(
        num, num_bytes(jax.tree.leaves(x)), kept + 2 * num_bytes(jax.tree.leaves(first))
    )


def _functional(layer: Any) -> tuple[Layer, PyTree]:
    """A layer as a pure function of its input and of what it holds."""
    if _is_nnx(layer):
        graph, state = _nnx().split(layer)
        return lambda x, state: _nnx().merge(graph, state)(x), state
    if _is_linen(layer):
        pure = layer.clone(parent=None, name=None)
        keys = {name: jax.random.key(0) for name in layer.scope.rngs}

        def apply(x: PyTree, variables: PyTree) -> PyTree:
            return pure.apply(variables, x, rngs=keys, mutable=True)[0]

        return apply, layer.variables
    return lambda x, _: layer(x), ()


# --- Flax, where it is used -----------------------------------------------------------


def _linen() -> Any:
    return sys.modules.get("flax.linen")


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _is_linen(layer: Any) -> bool:
    return _linen() is not None and isinstance(layer, _linen().Module)


def _is_nnx(layer: Any) -> bool:
    return _nnx() is not None and isinstance(layer, _nnx().Module)


def _initializing(layers: list[Any]) -> bool:
    """Whether a linen model is being initialised: no gradient will be asked for."""
    return any(_is_linen(layer) and layer.is_initializing() for layer in layers)
