r"""Policies: which values the forward pass keeps for the backward pass.

A :class:`Policy` is a value: frozen, hashable, equal to another that says the same, and
made of names and a few keywords. It is also what ``jax.checkpoint`` calls a policy, so
``jax.checkpoint(f, policy=policies.dots)`` works as it is. Policies combine::

    policies.dots | policies.save_names("attention")     what either keeps
    policies.dots - policies.save_names("scores")        what the first alone keeps

One precedence: what is subtracted is not kept; then a rule for a value's own name (save
or offload it) decides; then rules for kinds of operations (``dots``, ``none``). So
``none | offload_names("x")`` offloads ``x`` and saves everything else, and a name that
is both saved and offloaded by name is an error.

Names are those that ``jax.ad_checkpoint.checkpoint_name(x, "name")`` puts on values.
Routing decisions (``top_k``, ``argmax``, sorting by a float) are kept by every policy,
``full`` included: they are small, and a second pass that is compiled otherwise may
break a tie otherwise, and send a token to another expert than the forward pass did.
"""

from collections.abc import Callable, Collection
import dataclasses
import difflib
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "Policy",
    "dots",
    "dots_with_no_batch_dims",
    "full",
    "none",
    "offload_names",
    "regex",
    "resolve",
    "save_all_but",
    "save_names",
]

# What JAX takes as an answer: whether to save, or where to offload to.
Answer = Any
_DECISIONS = {"top_k", "approx_top_k", "argmax", "argmin"}
_JAX = jax.checkpoint_policies


class Policy:
    """Which values are kept. Combine with ``|`` and ``-``; equal and hashed by content.

    Made by the functions and constants of this module, or by :func:`resolve` from a
    string or from one of JAX's policies.
    """

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Answer:
        """As JAX asks: may the result of ``prim`` on ``avals`` be kept?"""
        if is_decision(prim, avals):
            return True
        return self.decide(prim, avals, params)

    def decide(self, prim: Any, avals: tuple[Any, ...], params: Any) -> Answer:
        """The answer without routing decisions: False, True, or JAX's for offload."""
        raise NotImplementedError

    def memory_of(self, name: str) -> str | None:
        """Where a rule for this very name keeps it; None without such a rule."""
        return None

    def names(self) -> frozenset[str]:
        """The names that are spelt out, subtracted ones too."""
        return frozenset()

    def patterns(self) -> frozenset[str]:
        """The regular expressions, subtracted ones too."""
        return frozenset()

    def withholds(self, name: str) -> bool:
        """Whether this name was subtracted, so that the value itself is not kept."""
        return False

    def __or__(self, other: Any) -> "Policy":
        return _Union(self, resolve(other)) if _is_policy(other) else NotImplemented

    def __ror__(self, other: Any) -> "Policy":
        return _Union(resolve(other), self) if _is_policy(other) else NotImplemented

    def __sub__(self, other: Any) -> "Policy":
        return (
            _Difference(self, resolve(other)) if _is_policy(other) else NotImplemented
        )

    def __rsub__(self, other: Any) -> "Policy":
        return (
            _Difference(resolve(other), self) if _is_policy(other) else NotImplemented
        )


@dataclasses.dataclass(frozen=True, repr=False)
class _Rule(Policy):
    """A rule for kinds of operations, known by its name."""

    kind: str

    def decide(self, prim: Any, avals: tuple[Any, ...], params: Any) -> Answer:
        return _RULES[self.kind](prim, *avals, **params)

    def __repr__(self) -> str:
        return self.kind


_RULES: dict[str, Callable[..., bool]] = {
    "full": _JAX.nothing_saveable,
    "none": _JAX.everything_saveable,
    "dots": _JAX.dots_saveable,
    "dots_with_no_batch_dims": _JAX.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True, repr=False)
class _Named(Policy):
    """A rule for names: a set of them, or a pattern; ``memory`` is where they go."""

    of: frozenset[str] | str
    memory: str = "device"

    def memory_of(self, name: str) -> str | None:
        if isinstance(self.of, str):
            return self.memory if re.fullmatch(self.of, name) else None
        return self.memory if name in self.of else None

    def decide(self, prim: Any, avals: tuple[Any, ...], params: Any) -> Answer:
        if prim.name != "name" or self.memory_of(params["name"]) is None:
            return False
        if self.memory == "device":
            return True
        # JAX's own policy makes the answer: what it consists of is not public.
        offload = _JAX.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[params["name"]],
            offload_src="device",
            offload_dst=self.memory,
        )
        return offload(prim, *avals, **params)

    def names(self) -> frozenset[str]:
        return frozenset() if isinstance(self.of, str) else self.of

    def patterns(self) -> frozenset[str]:
        return frozenset([self.of]) if isinstance(self.of, str) else frozenset()

    def __repr__(self) -> str:
        if isinstance(self.of, str):
            kind, what = "regex", [repr(self.of)]
        else:
            kind = "save_names" if self.memory == "device" else "offload_names"
            what = [repr(name) for name in sorted(self.of)]
        if self.memory != "device":
            what.append(f"to={self.memory!r}")
        return f"{kind}({', '.join(what)})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Wrapped(Policy):
    """A policy function of JAX's or the user's; hashed as the function is."""

    function: Callable[..., Any]

    def decide(self, prim: Any, avals: tuple[Any, ...], params: Any) -> Answer:
        answer = self.function(prim, *avals, **params)
        if callable(answer) and not isinstance(answer, type):
            raise TypeError(
                f"policy={self!r} returned a function when JAX asked it about "
                f"{prim.name}; it makes policies: call it, and pass what it returns"
            )
        # Answers of JAX that are no bools, by their classes, which are not public.
        kind = type(answer).__name__
        if kind in ("RecomputeType", "SaveableType"):
            return kind == "SaveableType"
        return answer

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclasses.dataclass(frozen=True, repr=False)
class _Union(Policy):
    left: Policy
    right: Policy

    def __post_init__(self) -> None:
        for name in sorted(self.names()):
            self.memory_of(name)

    def memory_of(self, name: str) -> str | None:
        places = {p.memory_of(name) for p in (self.left, self.right)} - {None}
        if len(places) > 1:
            a, b = sorted(str(place) for place in places)
            raise ValueError(
                f"{self!r} keeps the name {name!r} both in {a} and in {b}; keep it in "
                "one of them"
            )
        return places.pop() if places else None

    def decide(self, prim: Any, avals: tuple[Any, ...], params: Any) -> Answer:
        if prim.name == "name":
            self.memory_of(params["name"])  # raises for a name that goes two ways
        answers = [p.decide(prim, avals, params) for p in (self.left, self.right)]
        offload = [answer for answer in answers if not isinstance(answer, bool)]
        return offload[0] if offload else any(answers)

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def patterns(self) -> frozenset[str]:
        return self.left.patterns() | self.right.patterns()

    def withholds(self, name: str) -> bool:
        withheld = self.left.withholds(name) or self.right.withholds(name)
        return withheld and self.memory_of(name) is None

    def __repr__(self) -> str:
        return f"{self.left!r} | {_in_brackets(self.right)}"


@dataclasses.dataclass(frozen=True, repr=False)
class _Difference(Policy):
    left: Policy
    right: Policy

    def memory_of(self, name: str) -> str | None:
        return None if self.right.memory_of(name) else self.left.memory_of(name)

    def decide(self, prim: Any, avals: tuple[Any, ...], params: Any) -> Answer:
        return not self.right.decide(prim, avals, params) and self.left.decide(
            prim, avals, params
        )

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def patterns(self) -> frozenset[str]:
        return self.left.patterns() | self.right.patterns()

    def withholds(self, name: str) -> bool:
        return self.right.memory_of(name) is not None or self.left.withholds(name)

    def __repr__(self) -> str:
        left = self.left
        shown = f"({left!r})" if isinstance(left, _Union) else repr(left)
        return f"{shown} - {_in_brackets(self.right)}"


full: Policy = _Rule("full")
"""Keeps nothing but routing decisions: all is computed again."""

none: Policy = _Rule("none")
"""Keeps everything, as without rematerialisation."""

dots: Policy = _Rule("dots")
"""Keeps results of matrix products and convolutions."""

dots_with_no_batch_dims: Policy = _Rule("dots_with_no_batch_dims")
"""Keeps results of products with weights, not of attention scores with values."""


def _names(function: str, names: tuple[str, ...]) -> frozenset[str]:
    if not names:
        raise ValueError(f'{function}() has no name; write {function}("name")')
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{function}({name!r}): expected names, each a string of its own"
            )
    return frozenset(names)


def _memory(to: str) -> str:
    if to == "device":
        raise ValueError('to="device" is where values are; use policies.save_names')
    return to


def near(name: str, known: Collection[str]) -> str:
    """The end of an error: which of the known names may have been meant, if any."""
    by_letters = {other.lower(): other for other in sorted(known)}
    found = difflib.get_close_matches(name.lower(), by_letters, n=3, cutoff=0.6)
    matches = [by_letters[letters] for letters in found]
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def save_names(*names: str) -> Policy:
    """Keeps the values that carry these names, and nothing else.

    Args:
      *names: as given to ``jax.ad_checkpoint.checkpoint_name``.

    Returns:
      A policy, which costs the memory of the named values.

    Raises:
      TypeError: if a name is no string.
      ValueError: without a name.

    Examples:
      >>> from gradacc_jax import policies
      >>> policies.save_names("context", "out_proj") | policies.dots
      save_names('context', 'out_proj') | dots
    """
    return _Named(_names("save_names", names))


def save_all_but(*names: str) -> Policy:
    """Keeps every value except those that carry these names.

    The value that the name was put on is not kept either: it is the same array.
    :func:`gradacc_jax.remat` sees to that. ``jax.checkpoint`` alone cannot: it asks a
    policy about one operation at a time, and the operation before the name looks like
    any other.

    Args:
      *names: as given to ``jax.ad_checkpoint.checkpoint_name``.

    Returns:
      The policy ``none - save_names(*names)``.

    Raises:
      TypeError: if a name is no string.
      ValueError: without a name.

    Examples:
      >>> from gradacc_jax import policies
      >>> policies.save_all_but("scores")
      none - save_names('scores')
    """
    return _Difference(none, _Named(_names("save_all_but", names)))


def offload_names(*names: str, to: str = "pinned_host") -> Policy:
    """Keeps the values that carry these names in another memory; nothing else.

    Args:
      *names: as given to ``jax.ad_checkpoint.checkpoint_name``.
      to: the memory kind. ``[m.kind for m in device.addressable_memories()]`` lists a
        device's.

    Returns:
      A policy, which costs no memory on the device, and one copy out and one back for
      each value.

    Raises:
      TypeError: if a name is no string.
      ValueError: without a name, or for ``to="device"``.

    Examples:
      >>> from gradacc_jax import policies
      >>> policies.save_names("context") | policies.offload_names("mlp")
      save_names('context') | offload_names('mlp', to='pinned_host')
    """
    return _Named(_names("offload_names", names), _memory(to))


def regex(pattern: str, *, to: str | None = None) -> Policy:
    """Keeps the values whose whole name matches a regular expression.

    Args:
      pattern: as for ``re.fullmatch``.
      to: a memory kind to offload them to, as in :func:`offload_names`; None saves
        them where they are.

    Returns:
      A policy, which costs the memory of the matching values.

    Raises:
      ValueError: for a pattern that is none.

    Examples:
      >>> from gradacc_jax import policies
      >>> policies.dots - policies.regex(r".*scores")
      dots - regex('.*scores')
    """
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"pattern={pattern!r} is no regular expression: {error}"
        ) from error
    return _Named(pattern, "device" if to is None else _memory(to))


# The names that MaxText puts on values of its layers. Patterns, since no model has all.
_QKV = "(query|key|value|qkv)_proj"
_MLP = "mlpwi(_[01])?|mlpwo"
_STRINGS: dict[str, Policy] = {
    "full": full,
    "none": none,
    "dots": dots,
    "dots_with_no_batch_dims": dots_with_no_batch_dims,
    # JAX
    "nothing_saveable": full,
    "everything_saveable": none,
    "dots_saveable": dots,
    "checkpoint_dots": dots,
    "dots_with_no_batch_dims_saveable": dots_with_no_batch_dims,
    "checkpoint_dots_with_no_batch_dims": dots_with_no_batch_dims,
    # MaxText
    "minimal": regex(f"{_QKV}|out_proj|{_MLP}"),
    "minimal_with_context": regex(f"{_QKV}|context|out_proj|{_MLP}"),
    "minimal_flash": regex(f"{_QKV}|context|out_proj|{_MLP}"),
    "save_dot_with_context_except_mlp": regex(f"{_QKV}|context|out_proj"),
    "save_dot_except_mlp": regex(f"{_QKV}|out_proj"),
    "save_dot_except_mlpwi": regex(f"{_QKV}|out_proj|mlpwo"),
    "save_qkv_proj": regex(_QKV),
    "save_out_proj": save_names("out_proj"),
    "qkv_proj_offloaded": regex(_QKV, to="pinned_host"),
    "minimal_offloaded": regex(f"{_QKV}|out_proj|{_MLP}", to="pinned_host"),
    # haliax
    "recompute": full,
    "save_all": none,
    # torchtitan; its "selective" keeps products too, every second one of them
    "selective": dots_with_no_batch_dims,
    # Hugging Face
    "gradient_checkpointing": full,
}
_OURS_UNCALLED = (save_names, save_all_but, offload_names, regex)
_JAX_FACTORIES = {
    "save_only_these_names": "names",
    "save_any_names_but_these": "names",
    "save_anything_except_these_names": "names",
    "save_and_offload_only_these_names": "names",
    "save_from_both_policies": "policies",
    "offload_dot_with_no_batch_dims": "memory kinds",
}


def resolve(policy: Any) -> Policy:
    """The policy that is meant by a string, a bool, a function of JAX's, or a policy.

    Args:
      policy: a :class:`Policy`; a string (see the table of names in the documentation);
        True for ``full`` and False for ``none``, as Hugging Face's
        ``gradient_checkpointing``; or a function that JAX accepts as a policy. JAX's
        own policies become ours, so that their names are checked too.

    Returns:
      A :class:`Policy`.

    Raises:
      TypeError: for what is no policy, and for a function that makes policies and was
        not called.
      ValueError: for None, which means "recompute all" to JAX and "recompute nothing"
        to most people, and for unknown strings.

    Examples:
      >>> import jax
      >>> from gradacc_jax import policies
      >>> policies.resolve("checkpoint_dots")
      dots
      >>> policies.resolve(jax.checkpoint_policies.save_only_these_names("context"))
      save_names('context')
    """
    if isinstance(policy, Policy):
        return policy
    if policy is None:
        raise ValueError(
            'policy=None means full rematerialisation to JAX; say "full" for that, or '
            '"none" to keep everything'
        )
    if isinstance(policy, bool):
        return full if policy else none
    if isinstance(policy, str):
        if policy in _STRINGS:
            return _STRINGS[policy]
        raise ValueError(
            f"policy={policy!r} is not known{near(policy, _STRINGS)}; choose one of "
            f"{', '.join(_STRINGS)}, or name values with policies.save_names"
        )
    if callable(policy) and not isinstance(policy, type):
        return _from_function(policy)
    raise TypeError(
        f"policy={policy!r} is a {type(policy).__name__}; expected a string, a policy "
        "of gradacc_jax.policies, or a policy function of JAX's"
    )


def _from_function(function: Callable[..., Any]) -> Policy:
    for ours in _OURS_UNCALLED:
        if function is ours:
            raise TypeError(
                f"policy={ours.__name__} makes policies and was not called; write "
                f'policies.{ours.__name__}("name")'
            )
    for name, what in _JAX_FACTORIES.items():
        if function is getattr(_JAX, name, None):
            raise TypeError(
                f"policy={name} makes policies and was not called; pass {name}(...) "
                f"with the {what} it takes"
            )
    for kind, rule in _RULES.items():
        if function is rule:
            return _Rule(kind)
    translated = _translated(function)
    if translated is None and not _takes_params(function):
        raise TypeError(
            f"policy={function!r} does not take what JAX asks a policy: policy(prim, "
            "*avals, **params); if it makes policies, call it, and pass what it returns"
        )
    return _Wrapped(function) if translated is None else translated


def _takes_params(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _translated(function: Callable[..., Any]) -> Policy | None:
    """Ours for a policy that one of JAX's factories made; None where that is hidden.

    JAX makes some of them as closures and, in some versions, as dataclasses.
    """
    if type(function).__module__.startswith("jax."):
        made_by, given = type(function).__name__, dict(vars(function))
    elif getattr(function, "__module__", "").startswith("jax."):
        made_by = function.__qualname__.partition(".<locals>")[0]
        given = dict(inspect.getclosurevars(function).nonlocals)
    else:
        return None
    match made_by, given:
        case "save_anything_except_these_names", _:
            raise ValueError(
                "policy=save_anything_except_these_names(...) keeps those values all "
                "the same: JAX saves what the name was put on; use "
                "policies.save_all_but"
            )
        case (
            "save_only_these_names",
            {"names_which_can_be_saved": names},
        ) | (
            "SaveOnlyTheseNames",
            {"saveable_names": names},
        ):
            return _Named(frozenset(names))
        case (
            "save_any_names_but_these",
            {"names_not_to_save": names},
        ) | (
            "SaveAnyNamesButThese",
            {"names": names},
        ):
            return _Difference(_Named(".*"), _Named(frozenset(names)))
        case "save_from_both_policies", {"policy_1": left, "policy_2": right}:
            return resolve(left) | resolve(right)
        case "save_and_offload_only_these_names", {
            "names_which_can_be_saved": saved,
            "names_which_can_be_offloaded": there,
            "offload_src": "device",
            "offload_dst": memory,
        }:
            return _Named(frozenset(saved)) | _Named(frozenset(there), memory)
    return None


def is_decision(prim: Any, avals: tuple[Any, ...]) -> bool:
    """Whether the operation makes a decision that a second pass might make otherwise.

    Sorting counts where floats put integers in order: ``jnp.argsort``; but not where
    they put complex numbers in order too, which JAX cannot save.
    """
    if prim.name != "sort":
        return prim.name in _DECISIONS
    kinds = [aval.dtype for aval in avals if hasattr(aval, "dtype")]

    def has(kind: Any) -> bool:
        return any(jnp.issubdtype(k, kind) for k in kinds)

    return has(jnp.floating) and has(jnp.integer) and not has(jnp.complexfloating)


def _is_policy(other: Any) -> bool:
    return isinstance(other, Policy | str) or callable(other)


def _in_brackets(policy: Policy) -> str:
    nested = isinstance(policy, _Union | _Difference)
    return f"({policy!r})" if nested else repr(policy)
