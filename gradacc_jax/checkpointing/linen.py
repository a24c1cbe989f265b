"""Linen modules, rematerialised under the names they have.

``nn.remat(MLP)`` makes a class ``CheckpointMLP``, so that a module that names itself
becomes ``CheckpointMLP_0`` and finds no parameters under its old name. Here the subclass
has the name of the original, and the random streams, which are folded by path, agree.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
from flax.core import lift
from flax.linen import transforms

from gradacc_jax.checkpointing.arguments import Arguments, Static, is_bound
from gradacc_jax.checkpointing.regions import region


def call(
    module: nn.Module,
    fun: Callable[..., Any],
    given: Arguments,
    options: Any,
    where: str,
) -> Any:
    """Calls ``fun(module, ...)`` as a region of the module's variables and arguments.

    Args:
      module: a module with its variables.
      fun: a method of it, or a function of it.
      given: the other arguments.
      options: of ``remat``.
      where: what errors call ``fun``.

    Returns:
      What ``fun`` returns. The variables it changed are changed in ``module``.
    """

    # Flax calls this as a method of a copy of the module. Its own name keeps what goes
    # by a method's name, such as capture_intermediates, from taking the call for two.
    @functools.wraps(fun)
    def rematerialised(module: nn.Module, packed: Any, nodes: Any) -> Any:
        return given.call(functools.partial(fun, module), packed, nodes, where)

    rematerialised.__name__ = "rematerialised"
    del rematerialised.__wrapped__  # type: ignore[attr-defined]
    if getattr(fun, "method_handler_wrapped", False):
        rematerialised = nn.nowrap(rematerialised)

    def lifted(
        method: Callable[..., Any], scopes: Any, arguments: Any, nodes: Any
    ) -> Any:
        def packed_scopes(
            unpack: Callable[..., Any],
            repack: Callable[..., Any],
            variables: Any,
            rngs: Any,
        ) -> Any:
            def pure(variables: Any, rngs: Any, arguments: Any) -> Any:
                scopes = unpack(variables, rngs)
                result = method(scopes, arguments, nodes)
                return result, repack(scopes)

            inside = region(
                pure, options.policy, prevent_cse=options.prevent_cse, where=where
            )
            return inside(variables, rngs, arguments)

        everything = (True,)
        return lift.pack(packed_scopes, everything, everything, everything)(scopes)

    return transforms.lift_direct_transform(
        lifted, (rematerialised,), module, given.packed, given.nodes
    )


@functools.lru_cache(maxsize=None)
def subclass(cls: type[nn.Module], options: Any) -> type[nn.Module]:
    """The class with a rematerialised ``__call__``; one for each class and options."""
    if "__call__" not in dir(cls) or not hasattr(cls, "__call__"):
        raise TypeError(_no_call(cls))
    original = cls.__call__
    static = Static.of(original, options.static)

    @functools.wraps(original)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = Arguments(args, kwargs, static, is_bound)
        return call(self, original, given, options, cls.__name__)

    return same_name(cls, {"__call__": nn.nowrap(__call__)})


def same_name(cls: type[Any], namespace: dict[str, Any]) -> type[Any]:
    """A subclass that goes by the name of ``cls``."""
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **namespace,
    }
    return type(cls)(cls.__name__, (cls,), namespace)


def instance(module: nn.Module, options: Any) -> Any:
    """A module with a rematerialised ``__call__``.

    One that has no parent yet becomes another module of the subclass; one that is part
    of another is called where it is.
    """
    if module.scope is None and module.parent is None:
        return copied(module, subclass(type(module), options))

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = Arguments(args, kwargs, static, is_bound)
        return call(module, method, given, options, type(module).__name__)

    method = type(module).__call__
    static = Static.of(method, options.static)
    return functools.partial(called, module)


def copied(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """An unbound module with the fields of another, of this class."""
    fields = {
        name: getattr(module, name)
        for name, field in module.__dataclass_fields__.items()
        if field.init and name != "parent" and hasattr(module, name)
    }
    return cls(**fields, parent=None)


def _no_call(cls: type) -> str:
    return (
        f"{cls.__name__} has no __call__; decorate the methods that are called with "
        "@remat"
    )
