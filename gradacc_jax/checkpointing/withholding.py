"""Not keeping a named value where everything else is kept.

``y = checkpoint_name(f(x), "y")`` is two operations, ``f`` and the name, with the same
result. A policy that keeps everything but ``"y"`` says no to the name and yes to ``f``,
and the array is kept all the same. JAX asks a policy about one operation at a time, so
the policy cannot know that ``f`` leads to ``"y"``. Here the traced function is known:
each operation whose result is such a value, be it reshaped, is put between two marks,
which are names of our own. JAX asks in the order of the program; between the marks the
answer is no.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from gradacc_jax.checkpointing.policies import Policy

ClosedJaxpr = Any  # jax.extend.core has it, and the type checker does not see it
OPEN, CLOSE = "gradacc_jax.withheld", "gradacc_jax.kept"
# The same array in another form: to keep one is to keep all.
_VIEWS = {
    "convert_element_type",
    "copy",
    "expand_dims",
    "name",
    "reduce_precision",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
}


class Withholding:
    """The policy, with no for an answer between the marks.

    It remembers whether it is between them, so one is made for every region. What it
    does not see in order, it does not see at all: JAX asks about a region as a whole.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.between = False

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        if prim.name == "name" and params["name"] in (OPEN, CLOSE):
            self.between = params["name"] == OPEN
            return False
        return not self.between and self.policy(prim, *avals, **params)


def marked(closed: ClosedJaxpr, policy: Policy) -> Callable[..., list[Any]]:
    """The traced function, with marks around what makes values the policy withholds.

    Args:
      closed: the traced function.
      policy: the policy whose ``withholds`` decides.

    Returns:
      A function of the same flat arguments with the same flat results.
    """

    def run(*args: Any) -> list[Any]:
        return _evaluate(closed.jaxpr, closed.consts, args, (), policy)

    return run


def named(eqn: core.JaxprEqn) -> str | None:
    """The name that an operation puts on its operand; None if it is no such one."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    # jax_remat3 has an object for it.
    made: Any = eqn.params.get("_prim")
    return made.name if type(made).__name__.startswith("CheckpointName") else None


def operations(jaxpr: core.Jaxpr) -> Iterable[core.JaxprEqn]:
    """All operations of a traced function, nested ones too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from operations(inner)


def _evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    withheld_outputs: Iterable[int],
    policy: Policy,
) -> list[Any]:
    withheld = _withheld(jaxpr, withheld_outputs, policy)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        makes = [i for i, v in enumerate(eqn.outvars) if v in withheld]
        within = _holds_such_names(eqn, policy)
        with eqn.ctx.manager:
            if (makes or within) and _has_body(eqn):
                outputs = _bind(eqn, inputs, _inner(eqn, makes, policy))
            elif makes and named(eqn) is None:
                opened = [_mark(x, OPEN) for x in inputs]
                outputs = [_mark(y, CLOSE) for y in _bind(eqn, opened)]
            else:
                outputs = _bind(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _withheld(jaxpr: core.Jaxpr, outputs: Iterable[int], policy: Policy) -> set[Any]:
    """The variables that hold a withheld value, in whatever form."""
    found = {jaxpr.outvars[i] for i in outputs}
    found = {v for v in found if not isinstance(v, core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        name = named(eqn)
        if (name is not None and policy.withholds(name)) or (
            eqn.primitive.name in _VIEWS and eqn.outvars[0] in found
        ):
            found |= {v for v in eqn.invars[:1] if not isinstance(v, core.Literal)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _VIEWS and any(
            not isinstance(v, core.Literal) and v in found for v in eqn.invars[:1]
        ):
            found.add(eqn.outvars[0])
    # Arguments are there already.
    return found - {*jaxpr.invars, *jaxpr.constvars}


def _holds_such_names(eqn: core.JaxprEqn, policy: Policy) -> bool:
    return any(
        (name := named(inner)) is not None and policy.withholds(name)
        for jaxpr in core.jaxprs_in_params(eqn.params)
        for inner in operations(jaxpr)
    )


def _has_body(eqn: core.JaxprEqn) -> bool:
    """Whether the results are one for one those of the jaxprs it is bound with."""
    return eqn.primitive.name in ("jit", "pjit", "scan", "cond")


def _inner(eqn: core.JaxprEqn, makes: list[int], policy: Policy) -> dict[str, Any]:
    """The operation's parameters, with marks in its body."""

    def again(body: ClosedJaxpr) -> ClosedJaxpr:
        def run(*args: Any) -> list[Any]:
            return _evaluate(body.jaxpr, body.consts, args, makes, policy)

        return jax.make_jaxpr(run)(*body.in_avals)

    if "branches" in eqn.params:
        return {"branches": tuple(again(b) for b in eqn.params["branches"])}
    return {"jaxpr": again(eqn.params["jaxpr"])}


def _bind(
    eqn: core.JaxprEqn, inputs: list[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    params = eqn.primitive.get_bind_params({**eqn.params, **(params or {})})
    result = eqn.primitive.bind(*inputs, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _mark(x: Any, mark: str) -> Any:
    return checkpoint_name(x, mark) if isinstance(x, jax.Array) else x
