"""The arguments of a call: what is traced, what is static, and which are modules."""

from collections.abc import Callable, Sequence
import dataclasses
import difflib
import inspect
import sys
from typing import Any

import jax

PyTree = Any


@dataclasses.dataclass(frozen=True)
class _Hole:
    """Where a module was, or an array that is static."""

    index: int


class Arguments:
    """One call's arguments, with holes for what must not be traced as an array.

    Attributes:
      packed: the arguments as a pytree; modules and static arguments are holes in it.
      nodes: the modules, in the order of their holes.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: "Static",
        is_node: Callable[[Any], bool],
    ):
        self.nodes: list[Any] = []
        self._constants: list[Any] = []

        def leaf(x: Any) -> Any:
            if not is_node(x):
                return x
            self.nodes.append(x)
            return _Hole(len(self.nodes) - 1)

        def constant(x: Any) -> _Hole:
            self._constants.append(x)
            return _Hole(-len(self._constants))

        args, kwargs = static.hidden(args, kwargs, constant)
        self.packed = jax.tree.map(leaf, (args, kwargs), is_leaf=is_node)

    def call(
        self, fun: Callable[..., Any], packed: PyTree, nodes: Sequence[Any], where: str
    ) -> Any:
        """Calls ``fun``, with these modules, and these arrays for those in ``packed``.

        Raises:
          ValueError: if ``fun`` wrote into a list or dict that it was given: it got a
            copy, made of traced arrays, and the entries would be lost.
        """

        def fill(x: Any) -> Any:
            if not isinstance(x, _Hole):
                return x
            return self._constants[-x.index - 1] if x.index < 0 else nodes[x.index]

        def taken_apart() -> tuple[list[Any], Any]:
            return jax.tree.flatten(
                (args, kwargs), is_leaf=lambda x: any(x is node for node in nodes)
            )

        args, kwargs = jax.tree.map(fill, packed)
        leaves, tree = taken_apart()
        result = fun(*args, **kwargs)
        after, tree_after = taken_apart()
        if tree != tree_after or any(a is not b for a, b in zip(leaves, after)):
            raise ValueError(
                f"{where} writes into a list or dict that it is given; under remat it "
                "works on a copy, and what it wrote would be lost: return it instead"
            )
        return result


@dataclasses.dataclass(frozen=True)
class Static:
    """The arguments that are static though they are arrays, by name.

    Attributes:
      names: their names.
      order: all names that may be given by position, without ``self``.
    """

    names: tuple[str, ...] = ()
    order: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], static: Any) -> "Static":
        """From what a user writes: names and positions, one or several.

        Raises:
          ValueError: for an argument that ``function`` does not have.
        """
        if static is None:
            return cls()
        given = (static,) if isinstance(static, int | str) else tuple(static)
        parameters = list(inspect.signature(function).parameters.values())
        if parameters and parameters[0].name == "self":
            parameters = parameters[1:]
        kinds = inspect.Parameter
        order = tuple(
            p.name
            for p in parameters
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        )
        known = {p.name for p in parameters}
        takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
        where = getattr(function, "__qualname__", repr(function))
        names = []
        for one in given:
            if isinstance(one, str) and (one in known or takes_any):
                names.append(one)
            elif isinstance(one, int) and -len(order) <= one < len(order):
                names.append(order[one])
            else:
                near = difflib.get_close_matches(str(one), known, n=1)
                raise ValueError(
                    f"static={one!r} is no argument of {where}"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                    + f"; choose from {order}, or positions from 0 to "
                    f"{len(order) - 1} (self is not counted)"
                )
        return cls(tuple(names), order)

    def hidden(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hide: Callable[[Any], Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the static ones replaced by what ``hide`` makes."""
        by_position = {i for i, name in enumerate(self.order) if name in self.names}
        return (
            tuple(hide(x) if i in by_position else x for i, x in enumerate(args)),
            {k: hide(x) if k in self.names else x for k, x in kwargs.items()},
        )


def framework(thing: Any) -> str | None:
    """For a Flax module or its class "linen" or "nnx", without importing Flax."""
    for cls in (thing if isinstance(thing, type) else type(thing)).__mro__:
        if cls.__name__ == "Module" and cls.__module__.startswith("flax."):
            return "nnx" if ".nnx" in cls.__module__ else "linen"
    return None


def is_bound(thing: Any) -> bool:
    """Whether this is a linen module that has its variables."""
    return (
        framework(thing) == "linen"
        and not isinstance(thing, type)
        and thing.scope is not None
    )


def is_graph_node(thing: Any) -> bool:
    """Whether this is an object of nnx with state: a module, a variable, streams."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(thing, nnx.Pytree | nnx.Variable)


def same_name(cls: type[Any], namespace: dict[str, Any]) -> type[Any]:
    """A subclass that goes by the name of ``cls``."""
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **namespace,
    }
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), namespace)
