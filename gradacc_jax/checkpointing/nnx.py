"""Modules of nnx, rematerialised where they are: same paths, same variables."""

from collections.abc import Callable
import copy
import functools
from typing import Any

from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs

from gradacc_jax.checkpointing.arguments import (
    Arguments,
    Static,
    is_graph_node,
    same_name,
)
from gradacc_jax.checkpointing.modules import Rules, Seen, repeated_blocks
from gradacc_jax.checkpointing.regions import region

_TAG = "gradacc_jax.remat"


def call(
    fun: Callable[..., Any],
    selves: tuple[Any, ...],
    given: Arguments,
    options: Any,
    where: str,
) -> Any:
    """Calls ``fun(*selves, ...)`` as a region of the state of all modules it is given.

    Args:
      fun: the function or method.
      selves: the module whose method it is, or none.
      given: the other arguments.
      options: of ``remat``.
      where: what errors call ``fun``.

    Returns:
      What ``fun`` returns. Variables that it changed or made are changed or made in the
      modules, also where modules share them.
    """

    def pure(state: tuple[Any, ...], packed: Any) -> Any:
        def merged(*nodes: Any) -> Any:
            first, rest = nodes[: len(selves)], nodes[len(selves) :]
            called = functools.partial(fun, *first)
            return given.call(called, packed, rest, where)

        return merge_inputs(merged, ctxtag=_TAG)(*state)

    inside = region(pure, options.policy, prevent_cse=options.prevent_cse, where=where)

    def split(*state: Any) -> Any:
        return inside(state, given.packed)

    return split_inputs(split, ctxtag=_TAG)(*selves, *given.nodes)


@functools.cache
def subclass(cls: type[nnx.Module], options: Any) -> type[nnx.Module]:
    """The class with a rematerialised ``__call__``; one for each class and options."""
    original = cls.__call__
    static = Static.of(original, options.static)

    @functools.wraps(original)
    def called(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        given = Arguments(args, kwargs, static, is_graph_node)
        return call(original, (self,), given, options, cls.__name__)

    return same_name(cls, {"__call__": called})


def instance(module: nnx.Module, options: Any) -> nnx.Module:
    """Another module with the same variables, not copies, and the same submodules."""
    other = copy.copy(module)
    turn(other, options)
    return other


def turn(module: nnx.Module, options: Any) -> None:
    """Makes a module one of its rematerialised subclass, in place."""
    object.__setattr__(module, "__class__", subclass(type(module), options))


def turned(model: nnx.Module, rules: Rules) -> nnx.Module:
    """A copy of the model, with the modules of the rules turned."""
    model = nnx.clone(model)
    found = {
        tuple(str(part) for part in path): module
        for path, module in nnx.iter_modules(model)
        if path and callable(module)
    }
    seen = [Seen(path, type(module)) for path, module in found.items()]
    if rules.given is None:
        how = dict.fromkeys(repeated_blocks(seen), rules.options_of_blocks())
    else:
        how = {
            s.path: options
            for s in seen
            if (options := rules.options(s.path, s.cls)) is not None
        }
    rules.check(how, seen, type(model).__name__)
    for path, options in how.items():
        turn(found[path], options)
    names = {"/".join(path): options.policy for path, options in how.items()}
    shown = property(lambda self: dict(names))
    object.__setattr__(
        model, "__class__", same_name(type(model), {"rematerialised": shown})
    )
    return model
