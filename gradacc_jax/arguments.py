"""The roles of a function's positional arguments, checked: batches, keys, state."""

from collections.abc import Mapping
import operator
from typing import Any

import jax
import jax.numpy as jnp

from gradacc_jax import precision

PyTree = Any


def positions(name: str, numbers: Any) -> tuple[int, ...]:
    """An option such as ``batch_argnums``, one position or several, as a tuple."""
    given = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    for number in given:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(
                f"{name}={numbers!r}: expected positions of arguments, counted from 0"
            )
    return given


def count(name: str, number: Any) -> Any:
    """A number of things: None, a Python int, or a traced integer scalar."""
    if number is None:
        return None
    if isinstance(number, jax.core.Tracer):
        if number.shape == () and jnp.issubdtype(number.dtype, jnp.integer):
            return number
    elif not isinstance(number, bool):
        try:
            known = operator.index(number)
        except TypeError:
            pass
        else:
            if known >= 1:
                return known
            raise ValueError(f"{name}={known} is less than 1; choose at least 1")
    raise ValueError(f"{name}={number!r} is not an integer; choose at least 1")


def check_roles(roles: Mapping[str, tuple[int, ...]]) -> None:
    """Raises where one argument is in two options."""
    taken: dict[int, str] = {}
    for name, numbers in roles.items():
        for number in numbers:
            if number in taken:
                raise ValueError(
                    f"argument {number} is in {taken[number]} and in {name}; an "
                    "argument has one role"
                )
            taken[number] = name


def check_given(numbers: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Raises where an argument that has a role was not passed by position."""
    needed = max(numbers, default=0)
    if needed >= len(args):
        raise ValueError(
            f"argument {needed} has a role, but there are {len(args)} positional "
            "arguments; pass it by position"
        )


def check_key(number: int, key: Any) -> None:
    """Raises unless argument ``number`` is one PRNG key."""
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not ((typed and key.shape == ()) or (dtype == jnp.uint32 and key.ndim == 1)):
        raise ValueError(
            f"key_argnums: argument {number} is {type(key).__name__} of dtype {dtype}, "
            "not one PRNG key; pass jax.random.key(seed)"
        )


def states(new: Any, single: bool) -> Any:
    """New states as a tuple, as the old ones are; :func:`check_state` judges it."""
    if single:
        return (new,)
    return tuple(new) if isinstance(new, tuple | list) else new


def check_state(old: PyTree, new: PyTree) -> None:
    """Raises where a state that is carried through a loop changes what it is."""

    def described(state: PyTree) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path): f"{precision.dtype_of(x)}{list(jnp.shape(x))}"
            for path, x in jax.tree_util.tree_leaves_with_path(state)
        }

    before, after = described(old), described(new)
    tree: Any = jax.tree.structure(old)
    if tree == jax.tree.structure(new) and before == after:
        return
    changed = sorted(
        path for path in {*before, *after} if before.get(path) != after.get(path)
    )
    if not changed:
        raise ValueError(
            f"the carried state comes in as {tree} and goes out as "
            f"{jax.tree.structure(new)}; return it in the containers it came in"
        )
    raise ValueError(
        "the carried state changes from micro-batch to micro-batch: "
        + ", ".join(f"{p}: {before.get(p)} -> {after.get(p)}" for p in changed[:4])
        + "; return it in the structure, shapes and dtypes it came in"
    )
