"""``remat``: the decorator, for functions and for everything of Flax.

What is traced is decided call by call: arrays are, whatever else is given is not. So
there is nothing to count, and keywords and defaults work. A function whose first
argument is a linen module, or that is given objects of nnx, is lifted as these need it.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any, overload

from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.arguments import (
    Arguments,
    Static,
    framework,
    is_bound,
    is_graph_node,
)
from gradacc_jax.checkpointing.policies import Policy
from gradacc_jax.checkpointing.regions import region

# What others' remat takes, and what to do instead.
_INSTEAD = {
    "static_argnums": "arguments that are not arrays are static by themselves, so there"
    " is nothing to count; arrays that shall be static are named in static=",
    "variables": "all collections of variables are carried as they are without remat",
    "rngs": "all streams of random numbers are carried as they are without remat",
    "methods": "__call__ is rematerialised; decorate other methods with @remat in the"
    " class, or rematerialise a bound method, remat(module.method)",
    "concrete": "arguments that are not arrays are concrete by themselves",
    "graph": "modules of nnx are split and merged as graphs",
}
_INSTEAD["static_argnames"] = _INSTEAD["static_argnums"]
_INSTEAD["graph_updates"] = _INSTEAD["graph"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to rematerialise: one value, so that classes can be kept by it."""

    policy: Policy
    static: Any
    prevent_cse: bool


@overload
def remat(
    target: None = None,
    *,
    policy: Any = "full",
    static: Any = None,
    prevent_cse: bool = True,
    **refused: Any,
) -> Callable[[Any], Any]: ...
@overload
def remat(
    target: Any,
    *,
    policy: Any = "full",
    static: Any = None,
    prevent_cse: bool = True,
    **refused: Any,
) -> Any: ...
def remat(
    target: Any = None,
    *,
    policy: Any = "full",
    static: Any = None,
    prevent_cse: bool = True,
    **refused: Any,
) -> Any:
    r"""Computes the inside of a function again in the backward pass, to save memory.

    For :math:`y = f(x)` the forward pass keeps :math:`x`, and what the policy says,
    instead of all intermediate values; the backward pass computes those again. Values,
    gradients, parameters and their names and initial values, random numbers, masks,
    batch statistics and sown values are the same with it and without it. Without a
    gradient it does nothing.

    Wrap the blocks of a model, not the whole loss: the whole would be computed again,
    and kept, as the first thing that the backward pass does. A warning says so.

    Arrays among the arguments are traced, within lists and dicts too; everything else
    (``train=True``, strings, functions, modules) is static by itself.

    Args:
      target: a function; a class of Flax modules, linen or nnx, whose ``__call__`` is
        meant; one of its methods, in the class or bound; or a module. None makes a
        decorator: ``@remat(policy="dots")``.
      policy: what to keep: a string or one of :mod:`gradacc_jax.policies`; see
        :func:`gradacc_jax.policies.resolve`.
      static: arguments that are static although they are arrays: names or positions,
        one or several. Positions count as a call is written, without ``self``; negative
        ones count from the end.
      prevent_cse: whether to keep the compiler from merging the second computation
        with the first. False is faster, and safe in the body of a ``scan`` over layers;
        where it would undo everything, it is overridden, with a warning.
      **refused: options of other libraries; the error says what to do instead.

    Returns:
      What was given, with the same signature and name. For a class it is a subclass of
      the same name (which does not pickle, since its name means the original), for a
      module another module with the same variables.

      Memory: the arguments, and what the policy keeps. Time: for "full" at most one
      more forward pass, a third of a step.

    Raises:
      TypeError: for what cannot be rematerialised, and for options of other libraries.
      ValueError: for an unknown policy or static argument, and when called, if the
        function writes into a list or dict that it was given.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from gradacc_jax import remat
      >>> @remat(policy="dots")
      ... def block(w, x, activation="tanh"):
      ...     return getattr(jnp, activation)(x @ w)
      >>> w, x = jnp.eye(2), jnp.ones((1, 2))
      >>> jax.grad(lambda w: block(w, x, activation="sin").sum())(w).round(3)
      Array([[0.54, 0.54],
             [0.54, 0.54]], dtype=float32)

      >>> from flax import linen as nn
      >>> model = remat(nn.Dense)(3)
      >>> sorted(model.init(jax.random.key(0), x)["params"])
      ['bias', 'kernel']
    """
    for name in refused:
        if name not in _INSTEAD:
            raise TypeError(f"remat() has no argument {name!r}")
        raise TypeError(f"remat() has no argument {name!r}: {_INSTEAD[name]}")
    if isinstance(target, str | Policy):
        raise TypeError(f"remat({target!r}): write remat(policy={target!r})")
    options = Options(policies.resolve(policy), _hashable(static), bool(prevent_cse))
    if target is None:
        return functools.partial(_rematerialised, options=options)
    return _rematerialised(target, options)


def _rematerialised(target: Any, options: Options) -> Any:
    kind = framework(target)
    if kind == "linen":
        from gradacc_jax.checkpointing import linen

        if isinstance(target, type):
            return linen.subclass(target, options)
        return linen.instance(target, options)
    if kind == "nnx":
        from gradacc_jax.checkpointing import nnx

        if isinstance(target, type):
            return nnx.subclass(target, options)
        return nnx.instance(target, options)
    if isinstance(target, type) or not callable(target):
        raise TypeError(
            f"remat of {target!r}: expected a function, a method, or a module of Flax "
            "or its class"
        )
    if inspect.ismethod(target) and (
        is_bound(target.__self__) or is_graph_node(target.__self__)
    ):
        bound = functools.partial(function(target.__func__, options), target.__self__)
        return functools.wraps(target)(bound)
    return function(target, options)


def function(fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """A function or method, rematerialised."""
    static = Static.of(fun, options.static)
    where = getattr(fun, "__qualname__", repr(fun))

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if options.policy == policies.none:
            return fun(*args, **kwargs)
        if args and is_bound(args[0]):
            from gradacc_jax.checkpointing import linen

            module, *rest = args
            given = Arguments(tuple(rest), kwargs, static, is_bound)
            return linen.call(module, fun, given, options, where)
        if args and framework(args[0]) == "nnx":
            # The module itself is not counted among the arguments.
            args, selves = args[1:], args[:1]
        else:
            selves = ()
        given = Arguments(args, kwargs, static, is_graph_node)
        called = functools.partial(fun, *selves) if selves else fun
        if selves or given.nodes:
            from gradacc_jax.checkpointing import nnx

            return nnx.call(fun, selves, given, options, where)
        inside = region(
            lambda packed: given.call(called, packed, (), where),
            options.policy,
            prevent_cse=options.prevent_cse,
            where=where,
        )
        return inside(given.packed)

    return wrapper


def _hashable(static: Any) -> Any:
    return static if static is None or isinstance(static, int | str) else tuple(static)
