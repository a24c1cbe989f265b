"""remat_to_fit keeps its contract: compiled bytes, monotone, plans never mixed."""

import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import matplotlib
import numpy as np
import optax
import pytest

from gradacc_jax import RematReport, accumulate, remat_to_fit, train_step
from gradacc_jax.checkpointing.budget import fitting, selftest
from gradacc_jax.checkpointing.flops import flops_of
from gradacc_jax.checkpointing.sizes import parse_size, size_text
from tests import chips, programs

LAYERS, WIDTH, BATCH = 6, 32, 256
pytestmark = pytest.mark.newest

W = 0.2 * np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype("f")
X = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype("f")


def block(w, x):
    return x + jnp.tanh(jnp.sin(x @ w)) ** 2


def unrolled(w, x):
    for i in range(LAYERS):
        x = block(w[i], x)
    return jnp.mean(x**2)


def scanned(w, x):
    x, _ = lax.scan(lambda x, w: (block(w, x), None), x, w)
    return jnp.mean(x**2)


def temporaries(fun, *args):
    return programs.compiled(jax.value_and_grad(fun), *args).temporaries


def least(fun, *args, **options):
    """The bytes that the error for an impossible budget names."""
    with pytest.raises(ValueError, match="the smallest needs") as told:
        remat_to_fit(fun, *args, max_temp_bytes=1, **options)
    return int(str(told.value).partition("smallest needs ")[2].partition(" ")[0])


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_the_compiled_program_is_within_the_budget_and_no_fixed_policy_is_better(loss):
    plain = temporaries(loss, W, X)
    few = least(loss, W, X)
    assert few < 0.7 * plain

    def by_policy(policy):
        again = jax.checkpoint(block, policy=policy)

        def fun(w, x):
            if loss is scanned:
                x, _ = lax.scan(lambda x, w: (again(w, x), None), x, w)
            else:
                for i in range(LAYERS):
                    x = again(w[i], x)
            return jnp.mean(x**2)

        return temporaries(fun, W, X), flops_of(jax.value_and_grad(fun), W, X).total

    policies = jax.checkpoint_policies
    known = (policies.nothing_saveable, policies.dots_saveable)
    if loss is unrolled and selftest.engine_for(None) != "jax.checkpoint":
        known = ()  # a policy that the compiler undoes is none
    fixed = [(plain, flops_of(jax.value_and_grad(loss), W, X).total)]
    fixed += map(by_policy, known)
    wanted = jax.value_and_grad(loss)(W, X)
    seen = []
    # The largest first: what is known then serves the smaller ones too.
    for budget in np.linspace(few, 0.95 * plain, 3).astype(int)[::-1].tolist():
        fitted, report = remat_to_fit(loss, W, X, max_temp_bytes=budget)
        assert report.temp_bytes <= budget
        assert temporaries(fitted, W, X) == report.temp_bytes
        assert report.num_compiles <= 10
        assert report.plain_temp_bytes == plain
        fitting = [flops for nbytes, flops in fixed if nbytes <= budget]
        assert report.flops <= 1.01 * min(fitting, default=np.inf)
        made = jax.jit(jax.value_and_grad(fitted))(W, X)
        chex.assert_trees_all_close(made, wanted, rtol=1e-5, atol=1e-7)
        seen.append((report.temp_bytes, -report.flops))
    # A smaller budget needs no more bytes, and no fewer operations.
    assert seen == sorted(seen, reverse=True)


def test_budgets_near_each_other_do_not_cross():
    few = least(unrolled, W, X)
    plain = temporaries(unrolled, W, X)
    budgets = [few]
    while budgets[-1] < plain:
        budgets.append(int(1.05 * budgets[-1]))
    reports = [remat_to_fit(unrolled, W, X, max_temp_bytes=b)[1] for b in budgets]
    # Once more, since each of them left something for the others to know.
    reports = [remat_to_fit(unrolled, W, X, max_temp_bytes=b)[1] for b in budgets]
    used = [report.temp_bytes for report in reports]
    assert used == sorted(used)
    work = [report.flops for report in reports]
    assert work == sorted(work, reverse=True)


def deep(params, x):
    for p in params:
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def test_gradients_have_room_for_what_is_kept_until_they_are_written():
    ws, x = [jnp.eye(64)] * 24, jnp.ones((64, 64))

    def loss(ws, x):
        for w in ws:
            x = x + jnp.sin(jnp.tanh(jnp.sin(jnp.tanh(x @ w)))) @ w.T
        return jnp.mean(x**2)

    def blocks(ws, x):
        for w in ws:
            x = jax.checkpoint(
                lambda x, w: x + jnp.sin(jnp.tanh(jnp.sin(jnp.tanh(x @ w)))) @ w.T
            )(x, w)
        return jnp.mean(x**2)

    # The inputs of 24 blocks are as large as 24 gradients: most of them cost nothing,
    # and blocks one by one need less than fewer, larger segments.
    by_hand = temporaries(blocks, ws, x)
    assert by_hand < 6 * x.nbytes
    assert least(loss, ws, x) <= by_hand + x.nbytes
    # Where gradients are no results, they have no room for others.
    kept = least(loss, ws, x, within=lambda f, *args: jax.jit(norms_of(f)).lower(*args))
    assert kept > 2 * by_hand


def norms_of(fun):
    def norms(*args):
        return jax.tree.map(jnp.linalg.norm, jax.grad(fun)(*args))

    return norms


@pytest.mark.parametrize("part", [0.99, 0.95, 0.8])
def test_a_budget_is_met_where_predictions_are_too_high_by_far(part):
    # Small arrays, of which XLA fuses most.
    keys = jax.random.split(jax.random.key(0), 24)
    params = [
        {
            "up": jax.random.normal(key, (32, 128)) / 8,
            "down": jax.random.normal(key, (128, 32)) / 16,
        }
        for key in keys
    ]
    x = jnp.ones((32, 32))
    budget = int(part * temporaries(deep, params, x))

    def loss(params, x):  # of which nothing is known from another budget
        return deep(params, x)

    fitted, report = remat_to_fit(loss, params, x, max_temp_bytes=budget)
    assert temporaries(fitted, params, x) == report.temp_bytes <= budget


@pytest.mark.parametrize("length", [4, 7, 12])
def test_a_loop_is_no_worse_than_with_its_body_computed_again_by_hand(length):
    w, x = jnp.eye(64), jnp.ones((256, 64))

    def loss_of(wrap):
        def loss(w, x):
            def turn(h, _):
                return jax.nn.gelu(h + jnp.sin(jnp.tanh(h @ w)) @ w), None

            return jnp.mean(lax.scan(wrap(turn), x, length=length)[0] ** 2)

        return loss

    by_hand = loss_of(jax.checkpoint)
    budget = temporaries(by_hand, w, x)
    _, report = remat_to_fit(loss_of(lambda turn: turn), w, x, max_temp_bytes=budget)
    flops = flops_of(jax.value_and_grad(by_hand), w, x).total
    assert report.temp_bytes <= budget
    assert report.flops <= 1.01 * flops


def scanned_transformer(p, x, wrap=lambda block: block):
    def block(x, p):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        x = x + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ p["out"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    return jnp.mean(lax.scan(wrap(block), x, p)[0] ** 2)


def test_a_loop_over_the_layers_of_a_transformer_is_no_worse_than_by_a_policy():
    shapes = {"qkv": (32, 96), "out": (32, 32), "up": (32, 128), "down": (128, 32)}
    p = {k: jnp.ones((8, *shape)) / shape[0] for k, shape in shapes.items()}
    x = jnp.ones((8, 32, 32))
    names = ["nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"]
    for name in names:
        policy = getattr(jax.checkpoint_policies, name)

        def by_hand(p, x, policy=policy):
            return scanned_transformer(
                p, x, lambda block: jax.checkpoint(block, policy=policy)
            )

        # What is kept is the same; what is held besides differs by some of a turn:
        # 0.2 % of all for dots.
        budget = int(1.005 * temporaries(by_hand, p, x))
        _, report = remat_to_fit(scanned_transformer, p, x, max_temp_bytes=budget)
        flops = flops_of(jax.value_and_grad(by_hand), p, x).total
        assert report.flops <= 1.01 * flops, name


def test_what_has_one_plan_only_is_left_alone_or_refused():
    fitted, report = remat_to_fit(lambda x: jnp.sum(x @ x), W[0], max_temp_bytes="1MiB")
    assert report.flops == report.plain_flops
    np.testing.assert_allclose(fitted(W[0]), jnp.sum(W[0] @ W[0]), rtol=1e-6)
    with pytest.raises(ValueError, match="the smallest needs"):
        remat_to_fit(lambda x: jnp.sum(x @ x), W[0], max_temp_bytes=1)


def test_what_cannot_be_kept_by_a_name_is_in_no_report():
    def loss(w, x):
        c = lax.complex(x, x)
        for _ in range(4):
            c = jnp.sin(c * lax.complex(w, w)) / lax.complex(1 + jnp.abs(c), 0.0 * x)
        return jnp.sum(jnp.abs(c) ** 2)

    _, report = remat_to_fit(loss, W[0], W[1], max_temp_bytes="1GiB")
    assert all(point.temp_bytes < 2**30 for point in report.frontier)


def test_it_plans_under_a_mesh():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jnp.asarray(W[0])
    selftest.engine_for.cache_clear()
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("d")))
        budget = int(0.8 * temporaries(unrolled_of_one, w, x))
        fitted, report = remat_to_fit(unrolled_of_one, w, x, max_temp_bytes=budget)
        assert temporaries(fitted, w, x) == report.temp_bytes <= budget


def unrolled_of_one(w, x):
    for _ in range(LAYERS):
        x = block(w, x)
    return jnp.mean(x**2)


def test_what_fits_already_is_left_alone():
    args = W, X[:128]  # of which nothing is known yet
    plain = temporaries(unrolled, *args)
    fitted, report = remat_to_fit(unrolled, *args, max_temp_bytes=plain)
    assert (report.num_compiles, report.temp_bytes) == (1, plain)
    assert report.flops == report.plain_flops
    assert temporaries(fitted, *args) == plain


def test_gradients_in_float64_are_equal_to_a_few_eps():
    with jax.enable_x64(True):
        w, x = jnp.asarray(W, "float64"), jnp.asarray(X, "float64")
        plain = temporaries(scanned, w, x)
        fitted, report = remat_to_fit(scanned, w, x, max_temp_bytes=plain // 2)
        assert report.flops > report.plain_flops
        made, wanted = (jax.jit(jax.grad(f))(w, x) for f in (fitted, scanned))
        chex.assert_trees_all_close(made, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_ten_shapes_are_planned_once_each_and_never_mixed():
    planned = []
    fitted, first = remat_to_fit(
        scanned, W, X, max_temp_bytes="600KiB", progress=planned.append
    )
    batches = [X[:n] for n in range(256, 156, -10)]
    gradient = jax.jit(jax.grad(fitted))
    rounds = []
    for _ in range(2):
        for batch in batches:
            made = gradient(W, batch)
            chex.assert_trees_all_close(
                made, jax.grad(scanned)(W, batch), rtol=1e-5, atol=1e-7
            )
            assert temporaries(fitted, W, batch) <= 600 * 2**10
        rounds.append(len(planned))
    # Each shape was planned in the first round, by a compilation at least.
    assert first.num_compiles + len(batches) - 1 <= rounds[0] == rounds[1]
    # And small ones are left alone, not run by the plan of large ones.
    assert temporaries(fitted, W, X[:16]) == temporaries(scanned, W, X[:16])


def test_a_plan_for_a_batch_of_16_is_not_run_on_a_batch_of_4():
    args = W, X[:16]
    budget = int(0.6 * temporaries(scanned, *args))
    fitted, _ = remat_to_fit(scanned, *args, max_temp_bytes=budget)
    small = flops_of(jax.value_and_grad(fitted), W, X[:4]).total
    assert small == flops_of(jax.value_and_grad(scanned), W, X[:4]).total


# --- what counts ----------------------------------------------------------------------


def test_loops_of_equal_work_are_not_taken_for_the_same():
    def loss(w, x, mode):
        def body(h, _):
            h = jnp.tanh(jnp.tanh(h @ w) @ w)
            return (h[::-1] if mode == "reversed" else h), None

        return jnp.mean(lax.scan(body, x, None, length=32)[0] ** 2)

    w, x = W[0], X
    budget = int(0.7 * temporaries(lambda w, x: loss(w, x, "as is"), w, x))
    fitted, _ = remat_to_fit(loss, w, x, "as is", max_temp_bytes=budget)
    chex.assert_trees_all_close(
        jax.grad(fitted)(w, x, "reversed"),
        jax.grad(loss)(w, x, "reversed"),
        rtol=1e-5,
        atol=1e-7,
    )


def test_within_a_step_the_bytes_of_the_whole_step_count():
    tx = optax.adam(1e-3)
    state = tx.init(W)

    def within(loss, w, x):
        def step(w, state, x):
            gradient = jax.grad(loss)(w, x)
            updates, state = tx.update(gradient, state, w)
            return optax.apply_updates(w, updates), state

        with jax.numpy_dtype_promotion("standard"):
            return jax.jit(step).lower(w, state, x)

    plain = within(scanned, W, X).compile().memory_analysis().temp_size_in_bytes
    assert plain != temporaries(scanned, W, X)
    fitted, report = remat_to_fit(
        scanned, W, X, max_temp_bytes=int(0.7 * plain), within=within
    )
    assert report.plain_temp_bytes == plain
    made = within(fitted, W, X).compile().memory_analysis().temp_size_in_bytes
    assert made == report.temp_bytes <= 0.7 * plain


def test_bytes_of_sharded_arguments_are_those_of_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
    plain = temporaries(scanned, w, x)
    assert plain < 0.5 * temporaries(scanned, W, X)
    fitted, report = remat_to_fit(scanned, w, x, max_temp_bytes=int(0.8 * plain))
    assert report.plain_temp_bytes == plain
    assert temporaries(fitted, w, x) == report.temp_bytes <= 0.8 * plain
    chex.assert_trees_all_close(
        jax.jit(jax.grad(fitted))(w, x), jax.grad(scanned)(W, X), rtol=1e-5, atol=1e-7
    )


@pytest.mark.optax_promotes
@pytest.mark.parametrize("form", ["in one call", "ragged", "across calls"])
def test_a_training_step_fits_as_a_whole_and_trains_the_same(form):
    opt = optax.sgd(0.1)
    tx = accumulate(opt, 2) if form == "across calls" else opt
    options = {"donate": False}
    if form == "in one call":
        options["num_microbatches"] = 2
    if form == "ragged":
        options["microbatch_size"] = 96
    state = tx.init(W)
    plain = train_step(scanned, tx, **options)
    before = programs.program(plain.lower(W, state, X)).temporaries
    budget = int(0.8 * before)
    step = train_step(scanned, tx, max_temp_bytes=budget, **options)
    assert programs.program(step.lower(W, state, X)).temporaries <= budget
    chex.assert_trees_all_close(
        step(W, state, X), plain(W, state, X), rtol=1e-5, atol=1e-7
    )
    assert len(step.reports) == 1
    step(W, state, X[:128])
    assert len(step.reports) == 2


@pytest.mark.absent_chips
@pytest.mark.parametrize("chip", [chips.absent_gpu, chips.absent_tpu])
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_the_contract_holds_for_a_chip_that_is_not_here(chip, loss):
    sharding = chip()
    # Larger than a TPU's fast memory, where it counts as nothing.
    shapes = (LAYERS, 128, 128), (2**18, 128)
    w, x = chips.on(sharding, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    plain = temporaries_on_chip(loss, w, x)
    for part in (0.8, 0.65):
        fitted, report = remat_to_fit(loss, w, x, max_temp_bytes=int(part * plain))
        assert report.plain_temp_bytes == plain
        assert temporaries_on_chip(fitted, w, x) == report.temp_bytes <= part * plain
        assert report.flops < 1.4 * report.plain_flops


def temporaries_on_chip(fun, *args):
    # No costs are known there, so programs.compiled() does not do.
    compiled = jax.jit(jax.value_and_grad(fun)).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


# --- engines --------------------------------------------------------------------------


def test_an_engine_is_found_that_keeps_recomputation_in_place():
    assert selftest.engine_for(None) in selftest.ENGINES


def test_a_stack_that_keeps_nothing_in_place_is_told(monkeypatch):
    monkeypatch.setattr(fitting, "engine_for", lambda sharding: None)

    def loss(w, x):  # one that is not known yet
        return scanned(w, x)

    with pytest.warns(UserWarning, match="does not keep recomputation in place"):
        remat_to_fit(loss, W, X, max_temp_bytes=int(0.7 * temporaries(scanned, W, X)))


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_temp_bytes": 0}, "is no number of bytes above 0"),
        ({"max_temp_bytes": "many"}, "max_temp_bytes='many' is no number of bytes"),
        ({"max_temp_bytes": 1.5j}, "is no number of bytes"),
        ({"max_temp_bytes": 2**20, "argnums": 2}, "argnums=2 names argument 2"),
        ({"max_temp_bytes": True}, "max_temp_bytes=True is no number of bytes"),
        ({"max_temp_bytes": 2**20, "argnums": ()}, r"argnums=\(\) differentiates no"),
        ({"max_temp_bytes": 2**20, "max_compiles": 0}, "max_compiles=0"),
        (
            {"max_temp_bytes": 2**20, "max_compiles": 2.5},
            "max_compiles=2.5: expected a whole",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(options, message):
    with pytest.raises(ValueError, match=message):
        remat_to_fit(scanned, W, X, **options)


def test_within_must_return_a_lowered_program():
    with pytest.raises(TypeError, match="expected a lowered"):
        remat_to_fit(scanned, W, X, max_temp_bytes=2**20, within=lambda fun, *_: fun)


def test_a_step_is_given_a_policy_or_a_budget():
    def loss(w, x, policy="none"):
        return scanned(w, x)

    with pytest.raises(ValueError, match="choose one"):
        train_step(loss, optax.sgd(0.1), policy="dots", max_temp_bytes="1MiB")


# --- report and sizes -----------------------------------------------------------------


def test_the_report_tells_bytes_work_lines_and_the_frontier():
    matplotlib.use("Agg")
    plain = temporaries(unrolled, W, X)
    _, report = remat_to_fit(unrolled, W, X, max_temp_bytes=int(0.6 * plain))
    assert isinstance(report, RematReport)
    text = str(report)
    assert f"{size_text(report.temp_bytes)} of temporaries" in text
    assert "test_remat_to_fit.py:" in report.table()
    assert sum(s.recomputed_flops for s in report.segments) > 0
    points = [(p.temp_bytes, -p.flops) for p in report.frontier]
    assert len(points) > 3
    assert [flops for _, flops in points] == sorted(flops for _, flops in points)
    assert set(report.policies) == {"full", "dots", "dots_with_no_batch_dims"}
    assert report.policies["full"].flops > report.policies["dots"].flops
    figure = report.plot()
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert {"compiled", "full", "dots"} <= set(labels)
    matplotlib.pyplot.close(figure)


@pytest.mark.parametrize(
    ("given", "nbytes"), [("200MiB", 200 * 2**20), ("1.5 GB", 15 * 10**8), (7, 7)]
)
def test_a_size_is_a_number_or_says_its_unit(given, nbytes):
    assert parse_size("max_temp_bytes", given) == nbytes
