"""``remat_to_fit``: trace, plan, compile, choose; and the function that comes of it."""

import collections
from collections.abc import Callable, Sequence
import math
import sys
from typing import Any
import warnings

import jax

from gradacc_jax.checkpointing.budget.apply import Engine, checkpointed
from gradacc_jax.checkpointing.budget.costs import rates_of
from gradacc_jax.checkpointing.budget.planner import Planner
from gradacc_jax.checkpointing.budget.plans import Plan
from gradacc_jax.checkpointing.budget.report import (
    RematPoint,
    RematReport,
    segment_of,
)
from gradacc_jax.checkpointing.budget.request import Request, Temporaries, Within
from gradacc_jax.checkpointing.budget.search import Search, Trial
from gradacc_jax.checkpointing.budget.selftest import ENGINES, engine_for
from gradacc_jax.checkpointing.budget.traced import Traced, is_traced, shape
from gradacc_jax.checkpointing.flops import flops_of
from gradacc_jax.checkpointing.regions import Split
from gradacc_jax.checkpointing.sizes import parse_size, size_text

PyTree = Any


def remat_to_fit(
    fun: Callable[..., PyTree],
    *example_args: PyTree,
    max_temp_bytes: int | str,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    within: Within | None = None,
    max_compiles: int = 10,
    progress: Callable[[str], None] | None = None,
) -> tuple[Callable[..., PyTree], RematReport]:
    r"""Chooses by itself what to compute again, so that a program fits into memory.

    Given a loss and a number of bytes, returns a loss with the same values and
    gradients whose compiled program needs no more temporaries, at the least
    recomputation that was found. Nothing is named and nothing edited in the model.
    **Experimental**: what it decides may change from one version to the next.

    The function is traced and cut into segments where little crosses from one to the
    next. For every segment a minimum cut finds what is best saved and what computed
    again,

    .. math::
        \min \; \sum_{e \text{ again}} c_e + \lambda \sum_{v \text{ saved}} b_v ,

    with seconds c of operations, bytes b of values and one price λ of a byte for the
    whole program. Some of the plans that come of it are then compiled; the bytes that
    count are those of the compiled program (``temp_size_in_bytes``, on one device).

    Decisions (``top_k``, ``argmax``, sorting by a float) are kept and never made again.
    Random bits are computed again from their key, or kept, or what was made of them is
    kept, whichever is cheapest; they are the same bits. Operations with effects stay
    where they are, and run once.

    Args:
      fun: ``fun(*args)``: arrays and pytrees of them, and a result that is
        differentiated. Other arguments than arrays and numbers are static.
      *example_args: its arguments, or their shapes (``jax.ShapeDtypeStruct``). With a
        ``sharding``, of many devices or of a chip that is not here, the program is
        compiled for these.
      max_temp_bytes: the budget: bytes, or a string such as ``"200MiB"``.
      argnums: what ``fun`` is differentiated with respect to, as for ``jax.grad``.
      has_aux: whether ``fun`` returns ``(value, aux)``.
      within: the program whose bytes count, if it is not
        ``jax.value_and_grad(fun)``. ``within(fun, *args)`` is given the new function
        and the shapes of its arguments and returns what ``jax.jit(...).lower(...)``
        does: ``lambda fun, params, batch: step_of(fun).lower(params, state, batch)``.
      max_compiles: how many programs to compile at most.
      progress: told after each of them what it needs; by default a line is written to
        the terminal, if there is one.

    Returns:
      The new function and a :class:`RematReport`.

      The function takes the arguments of ``fun``, in any transformation, and gives the
      same values. A plan belongs to the shapes that it was made for: called with
      others, the function plans again, for the same budget, and keeps both.

      Memory: at most the budget. Time: that of the operations computed again, which the
      report counts; planning takes seconds, and each compilation what it takes.

    Raises:
      ValueError: if nothing fits, with the fewest bytes that were found; for a budget
        or ``argnums`` that make no sense; and for a ``fun`` whose results are no
        numbers.
      TypeError: if ``within`` returns no lowered program.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from gradacc_jax import remat_to_fit
      >>> def loss(w, x):
      ...     for _ in range(12):
      ...         x = jnp.tanh(x @ w)
      ...     return jnp.mean(x**2)
      >>> w, x = jnp.eye(64) / 2, jnp.ones((1024, 64))
      >>> fitted, report = remat_to_fit(loss, w, x, max_temp_bytes="2.5MiB")
      >>> report.temp_bytes <= 2.5 * 2**20 < report.plain_temp_bytes
      True
      >>> jnp.allclose(jax.grad(fitted)(w, x), jax.grad(loss)(w, x))
      Array(True, dtype=bool)

    References:
      T. Chen et al., *Training Deep Nets with Sublinear Memory Cost*,
      arXiv:1604.06174. P. Jain et al., *Checkmate*, arXiv:1910.02653.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not -len(example_args) <= number < len(example_args):
            raise ValueError(
                f"argnums={argnums} names argument {number}, and there are "
                f"{len(example_args)} example arguments; pass one for each argument of "
                "the function, by position"
            )
    if not numbers:
        raise ValueError("argnums=() differentiates nothing; name an argument, as in 0")
    if isinstance(max_compiles, bool | float) or max_compiles < 1:
        raise ValueError(
            f"max_compiles={max_compiles}: expected a whole number of at least 1"
        )
    places = tuple(number % len(example_args) for number in numbers)
    request = Request(
        fun=fun,
        argnums=places,
        has_aux=has_aux,
        bytes_of=Temporaries(places, has_aux, within),
        budget=parse_size("max_temp_bytes", max_temp_bytes),
        max_compiles=max_compiles,
        progress=_on_the_terminal if progress is None else progress,
        returns_gradients=within is None,
    )
    fitted = Fitted(request)
    return fitted, fitted.fit(example_args)


class TooSmallError(ValueError):
    """No program that was compiled fits into the budget."""


class Fitted:
    """The function that comes of a request: its plans, by the programs they are for.

    Args:
      request: what was asked for.
    """

    def __init__(self, request: Request):
        self.request = request
        self._plans: dict[Any, tuple[Plan, Engine]] = {}
        self.__name__ = request.name
        self.__doc__ = getattr(request.fun, "__doc__", None)

    def __call__(self, *args: PyTree) -> PyTree:
        traced = Traced(self.request.fun, args)
        key = traced.program.signature
        if key not in self._plans:
            self.fit(args)
        return traced.run(*self._plans[key])

    def fit(self, args: Sequence[PyTree]) -> RematReport:
        """Plans for arguments of these shapes."""
        request = self.request
        given = Split(args, is_traced)
        shapes = given.joined([_placed(x) for x in given.arrays])
        traced = Traced(request.fun, shapes)
        device, sharding = _device_of(given.arrays)
        search, planner = _search_of(request, traced, given, shapes, device)
        engine: Engine = checkpointed
        engine_name = "none needed"
        # Other shapes within the same program: the last micro-batch of a batch that
        # does not divide.
        others: dict[Any, list[Plan]] = {}

        def settle() -> None:
            nonlocal engine, engine_name
            if engine_name == "none needed":
                name = engine_for(sharding)
                engine = ENGINES[name or "jax.checkpoint"]
                engine_name = name or "none holds"

        def measure(plan: Plan) -> float:
            if plan.cost:
                settle()

            def trial(*args: PyTree) -> PyTree:
                now = Traced(request.fun, args)
                key = now.program.signature
                if key == traced.program.signature:
                    return now.run(plan, engine)
                if key not in others:
                    others[key] = request.plans(now, planner).frontier
                return now.run(_no_larger(others[key], plan), engine)

            return request.bytes_of(trial, shapes)

        best, compiles = search.fit(
            measure, request.budget, request.max_compiles, request.progress
        )
        if best is None:
            raise TooSmallError(self._too_small(search, len(search.trials)))
        if best.plan.cost:
            settle()  # which nothing did if the plan was known
        if engine_name == "none holds" and best.plan.cost:
            warnings.warn(
                f"{request.name}: the installed JAX does not keep recomputation in "
                f"place on {device.platform} outside of loops; of the plans for it "
                "fewer fit than should",
                stacklevel=3,
            )
        self._plans[traced.program.signature] = best.plan, engine
        for key, found in others.items():
            self._plans[key] = _no_larger(found, best.plan), engine
        return self._report(traced, shapes, search, best, compiles, engine_name)

    def _too_small(self, search: Search, compiles: int) -> str:
        request = self.request
        least = min(search.trials, key=lambda t: t.nbytes).nbytes
        head = (
            f"max_temp_bytes={request.budget} ({size_text(request.budget)}) is not "
            f"enough for {request.name}: "
        )
        if least == math.inf:
            return f"{head}none of {compiles} programs compiled"
        return (
            f"{head}of {compiles} programs that were compiled the smallest needs "
            f"{least:.0f} bytes ({size_text(least)}); choose at least as many, or a "
            "smaller micro-batch"
        )

    def _report(
        self,
        traced: Traced,
        shapes: Sequence[PyTree],
        search: Search,
        best: Trial,
        compiles: int,
        engine: str,
    ) -> RematReport:
        request = self.request
        plain = flops_of(traced.derivative(request.argnums), *traced.shapes).total
        chosen = traced.derivative(request.argnums, best.plan)
        compiled = {id(t.plan): t for t in search.trials}

        def point(plan: Plan) -> RematPoint:
            trial = compiled.get(id(plan))
            known = trial is not None and trial.nbytes < math.inf
            return RematPoint(
                round(max(search.estimate(plan), 0)),
                plain + plan.flops,
                round(trial.nbytes) if trial is not None and known else None,
            )

        as_it_was = search.plain.nbytes
        return RematReport(
            name=request.name,
            max_temp_bytes=request.budget,
            temp_bytes=round(best.nbytes),
            predicted_bytes=round(best.plan.peak),
            plain_temp_bytes=None if as_it_was == math.inf else round(as_it_was),
            flops=flops_of(chosen, *traced.shapes).total,
            plain_flops=plain,
            segments=tuple(map(segment_of, best.plan.pieces, best.plan.options)),
            frontier=tuple(map(point, search.plans.frontier)),
            policies={k: point(p) for k, p in search.plans.fixed.items()},
            num_compiles=compiles,
            engine=engine,
        )


# The searches of late, so that another budget for the same function begins with what is
# known: no program is compiled twice, and budgets near each other do not cross.
_searches: collections.OrderedDict[Any, tuple[Any, Search, Planner]]
_searches = collections.OrderedDict()
_KNOWN = 4


def _search_of(
    request: Request,
    traced: Traced,
    given: Split,
    shapes: Sequence[PyTree],
    device: Any,
) -> tuple[Search, Planner]:
    """The search for a function on arguments, if there was one, or a new one."""
    leaves, tree = jax.tree.flatten(tuple(shapes))
    asked = request.fun, request.argnums, request.has_aux, request.bytes_of
    key: Any = (*asked, tree, tuple(leaves), device)
    try:
        signature, search, planner = _searches.pop(key, (None, None, None))
    except TypeError:  # what is static need not be hashable
        key, signature, search, planner = None, None, None, None
    if search is None or planner is None or signature != traced.program.signature:
        planner = Planner(rates_of(device))
        # A backward pass is two of the forward.
        seconds = 3 * planner.seconds(traced.program)
        search = Search(request.plans(traced, planner), seconds)
    if key is not None:
        _searches[key] = traced.program.signature, search, planner
        while len(_searches) > _KNOWN:
            _searches.popitem(last=False)
    return search, planner


def _no_larger(plans: Sequence[Plan], than: Plan) -> Plan:
    """The cheapest plan that needs no more bytes than another one."""
    return next((p for p in reversed(plans) if p.peak <= than.peak), plans[0])


def _device_of(arrays: Sequence[Any]) -> tuple[Any, Any]:
    """The device that is compiled for, and a sharding on it alone if it was given."""
    for x in arrays:
        sharding = getattr(x, "sharding", None)
        if sharding is not None and not isinstance(x, jax.core.Tracer):
            device = min(sharding.device_set, key=lambda device: device.id)
            return device, jax.sharding.SingleDeviceSharding(device)
    return jax.devices()[0], None


def _placed(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an argument, where it lies if that was said."""
    aval = shape(x)
    if isinstance(x, jax.core.Tracer):
        return aval
    if isinstance(x, jax.Array) and not getattr(x, "committed", True):
        return aval
    sharding = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def _on_the_terminal(message: str) -> None:
    if sys.stderr.isatty():
        print(f"remat_to_fit: {message}", file=sys.stderr, flush=True)
