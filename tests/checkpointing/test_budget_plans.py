"""Plans for all kinds of functions: the same values and gradients."""

import functools
import itertools

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax.checkpointing.budget.apply import barred, checkpointed, conditional
from gradacc_jax.checkpointing.budget.combining import Combinations
from gradacc_jax.checkpointing.budget.costs import Rates
from gradacc_jax.checkpointing.budget.cuts import Segment
from gradacc_jax.checkpointing.budget.needs import _needs_of_piece, needs_of
from gradacc_jax.checkpointing.budget.planner import Planner
from gradacc_jax.checkpointing.budget.plans import Again, Alone, InLoop, Option, Piece
from gradacc_jax.checkpointing.budget.programs import Program
from gradacc_jax.checkpointing.budget.traced import Traced
from gradacc_jax.checkpointing.flops import flops_of
from tests.checkpointing import models
from tests.checkpointing.models import quick

pytestmark = pytest.mark.newest

RATES = Rates(1e9, 1e9, 1e9)
ENGINES = {"checkpoint": checkpointed, "barrier": barred, "branch": conditional}
# Between two programs that compute the same in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def plans_of(fun, *args, has_aux=False):
    """The plans for ``fun``, the fewest bytes first."""
    return Traced(fun, args).plans(Planner(RATES), [0], has_aux).frontier


def by(plan, fun, engine=checkpointed):
    """The function, run by a plan."""

    @functools.wraps(fun)
    def run(*args):
        return Traced(fun, args).run(plan, engine)

    return run


def check(fun, *args, has_aux=False, engine=checkpointed):
    """The smallest plan gives the values and gradients of ``fun``."""
    gradient = functools.partial(jax.value_and_grad, has_aux=has_aux, allow_int=True)
    plans = plans_of(fun, *args, has_aux=has_aux)
    assert plans[-1].cost == 0
    assert len(plans) > 1
    wanted = quick(gradient(fun), *args)
    made = quick(gradient(by(plans[0], fun, engine)), *args)
    chex.assert_trees_all_close(made, wanted, **TOLERANCE)


def layers(number=3, width=8):
    key = jax.random.key(0)
    w = 0.3 * jax.random.normal(key, (number, width, width))
    return w, jax.random.normal(key, (16, width))


def chain(block):
    """A loss of blocks in a row, unrolled."""

    def loss(w, x):
        for layer in w:
            x = block(layer, x)
        return jnp.mean(x**2)

    return loss


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(
    lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (jnp.clip(g, -0.1, 0.1) * cos,)
)


def nested(w, x):
    return jax.jit(lambda x: jnp.tanh(jnp.sin(x @ w)) ** 2)(x)


def with_custom_vjp(w, x):
    return clipped(jnp.sin(x @ w))


def with_custom_jvp(w, x):
    return jax.nn.relu(jnp.sin(x @ w)) + jax.nn.silu(x)


def with_cond(w, x):
    return lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ w), lambda: jnp.tanh(x @ w))


def with_while(w, x):
    steps = lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
    return jnp.sin(x @ w) * steps.astype(x.dtype)


def with_fori(w, x):
    return lax.fori_loop(0, 5, lambda _, x: jnp.sin(jnp.tanh(x @ w)), x)


def with_its_own_remat(w, x):
    x = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w)))(x)
    return jnp.sin(jnp.tanh(jnp.sin(x)))


def with_a_mask(w, x):
    h = jnp.sin(jnp.tanh(x @ w))
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, h.shape)
    return x + jnp.where(mask, h, 0)


def with_routing(w, x):
    gates, picked = lax.top_k(jax.nn.softmax(jnp.sin(x @ w)), 2)
    order = jnp.argsort(x[:, 0])
    return x[order] + jax.nn.one_hot(picked, 8).sum(1) * gates.sum(-1, keepdims=True)


BLOCKS = [
    nested,
    with_custom_vjp,
    with_custom_jvp,
    with_cond,
    with_while,
    with_fori,
    with_its_own_remat,
    with_a_mask,
    with_routing,
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_values_and_gradients_are_those_of_the_function(block):
    check(chain(block), *layers())


@pytest.mark.parametrize("engine", ["barrier", "branch"])
@pytest.mark.parametrize("block", [with_custom_vjp, with_a_mask, with_routing])
def test_every_engine_gives_the_same(block, engine):
    check(chain(block), *layers(), engine=ENGINES[engine])


SCAN = pytest.param(True, id="scan", marks=pytest.mark.slow)


@pytest.mark.parametrize("scan", [pytest.param(False, id="unrolled"), SCAN])
@pytest.mark.parametrize("kind", models.PROGRAMS)
def test_models_with_dropout_statistics_and_sown_values_give_the_same(kind, scan):
    loss, params = models.PROGRAMS[kind](lambda block: block, jnp.float32, scan)
    check(loss, params, has_aux=True)


def test_bfloat16_stays_bfloat16():
    w, x = (a.astype(jnp.bfloat16) for a in layers())
    fun = chain(nested)
    plan = plans_of(fun, w, x)[0]
    made = quick(jax.grad(by(plan, fun)), w, x)
    assert made.dtype == jnp.bfloat16
    # Fused otherwise, a value may be rounded otherwise.
    wanted = quick(jax.grad(fun), w, x)
    np.testing.assert_allclose(
        made.astype(np.float32), wanted.astype(np.float32), rtol=0.1, atol=1e-3
    )


def test_it_can_be_batched_and_differentiated_forwards_and_twice():
    w, x = layers(3, 4)
    fun = chain(nested)
    smallest = by(plans_of(fun, w, x)[0], fun)
    xs = jnp.stack([x, 2 * x])
    for transformed in (
        lambda f: quick(jax.vmap(jax.grad(f), (None, 0)), w, xs),
        lambda f: quick(lambda *args: jax.jvp(f, args, args), w, x),
        lambda f: quick(jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) ** 2)), w),
    ):
        chex.assert_trees_all_close(
            transformed(smallest), transformed(fun), **TOLERANCE
        )


def test_complex_values_are_computed_again_or_left():
    def fun(w, x):
        for _ in range(3):
            x = jnp.abs(jnp.fft.fft(jnp.tanh(x @ w)))
        return jnp.mean(x**2)

    check(fun, jnp.eye(16) / 2, jnp.ones((64, 16)))


def test_complex_values_in_the_order_of_others_are_sorted_again():
    def loss(w, x):
        for layer in w:
            y = jnp.tanh(x @ layer)
            z = lax.complex(y[:, 0], y[:, 1])
            _, z = lax.sort((lax.stop_gradient(y[:, 2]), z), num_keys=1)
            x = jnp.sin(y + jnp.abs(z)[:, None])
        return jnp.mean(x**2)

    check(loss, *layers())


def test_integers_and_what_is_not_differentiated_come_back():
    def fun(w, x):
        y = x
        for layer in w:
            y = jnp.tanh(jnp.sin(y @ layer)) ** 2
        return jnp.mean(y**2), {"where": jnp.argmax(y, 1), "name": "of the run"}

    w, x = layers()
    plan = plans_of(fun, w, x, has_aux=True)[0]
    _, aux = by(plan, fun)(w, x)
    assert aux["name"] == "of the run"
    np.testing.assert_array_equal(aux["where"], fun(w, x)[1]["where"])


def test_an_effect_stays_where_it_is_and_happens_once(capfd):
    def block(w, x):
        x = jnp.sin(jnp.tanh(x @ w))
        jax.debug.print("seen")
        return jnp.sin(jnp.tanh(x @ w))

    w, x = layers(2)
    fun = chain(block)
    plan = plans_of(fun, w, x)[0]
    jax.block_until_ready(jax.grad(by(plan, fun))(w, x))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2


def test_what_a_function_closes_over_is_not_what_it_closed_over_once():
    w, x = layers()
    plan = plans_of(lambda w: chain(nested)(w, x), w)[0]

    def outer(w, x):
        return jax.grad(by(plan, lambda w: chain(nested)(w, x)))(w)

    for scale in (1.0, 2.0):
        made = quick(outer, w, scale * x)
        wanted = quick(jax.grad(chain(nested)), w, scale * x)
        chex.assert_trees_all_close(made, wanted, **TOLERANCE)


# --- decisions ------------------------------------------------------------------------


def again_in(jaxpr, name):
    """How many operations of a name a traced program has, in loops and branches too."""
    found = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found += eqn.primitive.name == name
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found += again_in(inner, name)
    return found


@pytest.mark.parametrize("name", ["top_k", "sort"])
def test_a_decision_is_made_once(name):
    w, x = layers()
    fun = chain(with_routing)
    plans = plans_of(fun, w, x)
    for plan in (plans[0], plans[len(plans) // 2], plans[-1]):
        jaxpr = jax.make_jaxpr(jax.grad(by(plan, fun)))(w, x)
        assert again_in(jaxpr, name) == 3


def test_random_bits_are_drawn_again_or_their_mask_is_kept():
    w, x = layers()
    fun = chain(with_a_mask)
    smallest = plans_of(fun, w, x)[0]
    jaxpr = jax.make_jaxpr(jax.grad(by(smallest, fun)))(w, x)
    assert 3 <= again_in(jaxpr, "random_bits") <= 6
    for plan in plans_of(fun, w, x):
        for piece, option in zip(plan.pieces, plan.options):
            if isinstance(option.way, Again):
                kept = [piece.program.avals[v].dtype for v in option.way.saved]
                assert "uint32" not in map(str, kept)


# --- loops ----------------------------------------------------------------------------


def recurrent(length, reverse=False):
    w, x = 0.3 * jnp.eye(8), jnp.linspace(-1, 1, length).reshape(length, 1, 1)

    def loss(w, x):
        def cell(h, x):
            h = jnp.tanh(jnp.sin(h @ w) + x)
            return h, jnp.sum(h)

        h, sums = lax.scan(cell, jnp.ones((3, 8)), x, reverse=reverse)
        weights = jnp.linspace(0, 1, length)
        return jnp.sum(h**2) + jnp.vdot(sums, weights)

    return loss, w, x


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [36, 37])
def test_a_long_loop_becomes_one_of_loops_also_of_a_prime_number_of_turns(
    length, reverse
):
    loss, w, x = recurrent(length, reverse)
    plans = plans_of(loss, w, x)
    loops = [o.way for plan in plans for o in plan.options if isinstance(o.way, InLoop)]
    assert any(way.turns is not None for way in loops)
    wanted = quick(jax.grad(loss, (0, 1)), w, x)
    for plan in plans[:2]:
        made = quick(jax.grad(by(plan, loss), (0, 1)), w, x)
        chex.assert_trees_all_close(made, wanted, **TOLERANCE)


def several_at_once(plans):
    """The plans in which a loop's body is several turns, and that loop's choice."""
    for plan in plans:
        for option in plan.options:
            if isinstance(option.way, InLoop) and option.way.loop.at_once > 1:
                yield plan, option
                break


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [36, 39, 50])
def test_turns_that_keep_and_turns_that_do_not_are_in_one_loop(length, reverse):
    w, x = 0.3 * jnp.eye(8), jnp.linspace(-1, 1, length).reshape(length, 1, 1)
    keys = jax.random.split(jax.random.key(0), length)

    def loss(w, x):
        def cell(carry, inputs):
            (h, turn, _), (x, key) = carry, inputs
            mask = jax.random.bernoulli(key, 0.5, h.shape)
            h = jnp.where(mask, jnp.tanh(jnp.sin(h @ w) + x), h)
            return (h, turn + 1, 1.0), {"sum": jnp.sum(h), "key": key, "turn": turn}

        start = jnp.ones((3, 8)), 0, 0.0
        carry, made = lax.scan(cell, start, (x, keys), reverse=reverse)
        weights = made["turn"].astype(float) + jnp.linspace(0, 1, length)
        total = jnp.sum(carry[0] ** 2) + jnp.vdot(made["sum"], weights)
        return total / length**2, made

    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    wanted = quick(gradient(loss), w, x)
    plans = list(several_at_once(plans_of(loss, w, x, has_aux=True)))
    assert plans
    assert all(length % option.way.loop.at_once == 0 for _, option in plans)
    for plan, _ in [plans[0], plans[-1]]:
        made = quick(gradient(by(plan, loss)), w, x)
        for (_, aux), _ in (made, wanted):
            aux["key"] = jax.random.key_data(aux["key"])
        chex.assert_trees_all_close(made, wanted, **TOLERANCE)


def test_a_loop_keeps_more_where_there_is_room_for_some_of_its_turns():
    loss, w, x = recurrent(64)
    plans = plans_of(loss, w, x)
    peaks = [plan.peak for plan in plans]
    steps = [b - a for a, b in itertools.pairwise(peaks)]
    # Four turns at a time: no step is as large as what one value takes in all turns.
    assert max(steps) < 64 * 3 * 8 * 4 / 2


def test_of_a_loops_body_all_ways_to_choose_are_looked_at():
    def piece(*choices):
        options = [Option(kept, 0.0, cost, 0.0, Alone()) for kept, cost in choices]
        return Piece(Segment(0, 0), nothing, [], [], 0.0, options)

    nothing = Program((), (), 0, ())
    # What spares most for a byte comes first, and leaves no room for the other.
    pieces = piece((0, 9), (6, 0)), piece((0, 32), (24, 0))
    found = Combinations(nothing, 0, pieces, turns=2, room=np.zeros(2)).plans()
    assert [(p.kept, p.cost) for p in found] == [(0, 41), (6, 32), (24, 9), (30, 0)]


def test_arrays_without_elements_go_through_loops_and_every_engine():
    def loss(w, x):
        def turn(carry, empty):
            nothing, h = carry
            h = h + jnp.sin(jnp.tanh(h @ w) @ w) @ w
            return (jnp.tanh(nothing + empty), h), nothing

        empty = jnp.zeros((6, 16, 0))
        (nothing, h), made = lax.scan(turn, (x[:, :0], x), empty)
        return jnp.mean(h**2) + jnp.sum(nothing) + jnp.sum(made)

    def in_a_row(w, x):
        nothing = x[:, :0]
        for layer in w:
            nothing = jnp.tanh(nothing)
            x = x + jnp.sin(jnp.tanh(x @ layer)) @ layer
            x = jnp.concatenate([jnp.tanh(x), nothing], -1)
        return jnp.mean(x**2)

    w, x = layers()
    wanted = quick(jax.grad(loss), w[0], x)
    plans = plans_of(loss, w[0], x)
    assert list(several_at_once(plans))
    for plan in plans:
        made = quick(jax.grad(by(plan, loss)), w[0], x)
        chex.assert_trees_all_close(made, wanted, **TOLERANCE)
    for engine in ENGINES.values():
        check(in_a_row, w, x, engine=engine)


def test_loops_in_loops_are_planned_once_and_give_the_same():
    w, x = 0.3 * jnp.eye(8), jnp.ones((12, 3, 8))

    def loss(w, x):
        def outer(h, x):
            def inner(h, _):
                return jnp.tanh(jnp.sin(h @ w) + x), None

            h, _ = lax.scan(inner, h, length=8)
            return jnp.sin(h), None

        return jnp.mean(lax.scan(outer, jnp.ones((3, 8)), x)[0] ** 2)

    planner = Planner(RATES)
    plans = Traced(loss, (w, x)).plans(planner, [0], False).frontier
    assert len(planner._loops) == 2
    wanted = quick(jax.grad(loss, (0, 1)), w, x)
    for plan in plans[:: max(len(plans) // 4, 1)]:
        made = quick(jax.grad(by(plan, loss), (0, 1)), w, x)
        chex.assert_trees_all_close(made, wanted, **TOLERANCE)


def test_a_loops_work_is_counted_as_often_as_it_turns():
    loss, w, x = recurrent(64)
    plain = flops_of(jax.value_and_grad(loss), w, x).total
    for plan in plans_of(loss, w, x):
        counted = flops_of(jax.value_and_grad(by(plan, loss)), w, x).total
        # What a derivative's own rule computes again is not in the plan.
        assert counted == pytest.approx(plain + plan.flops, rel=0.1)


# --- needs ----------------------------------------------------------------------------


def test_needs_are_the_same_piece_by_piece_and_all_at_once():
    w, x = layers(14)
    program = Traced(chain(with_a_mask), (w, x)).program
    assert len(program.operations) > 150
    assert needs_of(program, [0]) == _needs_of_piece(program, [0])


def test_nothing_is_kept_for_what_is_only_reported():
    def fun(w, x):
        return jnp.mean(jnp.sin(x @ w)), jnp.exp(jnp.tanh(jnp.sin(x @ w)))

    w, x = jnp.eye(8), jnp.ones((16, 8))
    with_aux = plans_of(fun, w, x, has_aux=True)[-1]
    without = plans_of(lambda w, x: fun(w, x)[0], w, x)[-1]
    assert with_aux.peak == without.peak


def test_a_program_is_cut_where_it_is_large_though_most_of_it_is_small():
    def fun(w, x):
        for _ in range(16):
            x = jnp.sin(jnp.tanh(jnp.sin(x @ w)))
        x = x[:8]
        for _ in range(400):
            x = jnp.sin(x * w[:8])
        return jnp.sum(x)

    w, x = jnp.ones((32, 32)), jnp.ones((4096, 32))
    traced = Traced(fun, (w, x))
    least, *_, plain = traced.plans(Planner(RATES), [0], False).frontier
    # Three arrays of each large layer are read again; their inputs and one layer's are
    # 19 of 48.
    assert plain.peak > 47 * x.nbytes
    assert least.peak < 19.5 * x.nbytes
    # And a segment may hold the more the less is kept before it: 10 of 48.
    assert least.peak < 12 * x.nbytes
