"""The state: its shape never changes, it can be saved, restored and asked."""

import inspect
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from gradacc_jax import (
    AccumulateState,
    SkipCounts,
    accumulate,
    accumulation_metrics,
    from_multi_steps_state,
    has_updated,
    raise_if_skipping,
)
from tests.accumulation.driving import (
    SGD,
    ZERO,
    Step,
    assert_same_bits,
    drive,
    jitted,
    moves,
    signature,
)
from tests.lenient import lenient

NAN = float("nan")
EPS = np.finfo(np.float32).eps

PARAMS = {
    "f32": np.float32([1, -2, 0.5]),
    "bf16": np.array([[1, -2]], jnp.bfloat16),
    "none": None,
}
ADAMW = lenient(optax.adamw(optax.linear_schedule(0.1, 0.01, 3)))


def gradients(n, seed=0):
    rng = np.random.default_rng(seed)

    def draw(p):
        return rng.normal(size=p.shape).astype(p.dtype)

    return [jax.tree.map(draw, PARAMS) for _ in range(n)]


def skip(grads, gradient_step, params):
    bad = ~jnp.isfinite(jnp.sum(grads["f32"]))
    return bad, {"norm": jnp.sum(grads["f32"]), "weak": jnp.asarray(0.5)}


OPTIONS = {
    "defaults": {},
    "should_skip_update_fn": {"should_skip_update_fn": skip},
    "skip micro-batches": {"skip_nonfinite": "micro_batch"},
    "skip windows": {"skip_nonfinite": "window"},
    "the gradient's dtype": {"accumulator_dtype": None},
    "inner_dtype": {"inner_dtype": jnp.float32},
    "sums": {"loss_reduction": "sum", "use_grad_mean": False},
    "more averages": {"average_extra_args": ("value", "loss")},
    "no averages": {"average_extra_args": ()},
}
PATTERN = {
    # Every way a micro-step can end, in every order that matters.
    "weight": [np.float32(w) for w in (1, 2, 0, 0, 1, 1)],
    "value": [np.float32(v) for v in range(6)],
    "traced_emit": [np.bool_(e) for e in (0, 0, 0, 1, 1, 0)],
}


# --- its shape -----------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("k", [1, 2])
def test_structure_shapes_dtypes_and_weak_types_never_change(name, k):
    tx = accumulate(ADAMW, k, **OPTIONS[name])
    start = signature(tx.init(PARAMS))
    grads = gradients(6)
    grads[1]["f32"][0] = np.nan
    for step in drive(tx, grads, params=PARAMS, **PATTERN):
        assert signature(step.state) == start
    # Nothing in it but arrays, and none of them is there twice: it can be donated.
    leaves = jax.tree.leaves(tx.init(jax.tree.map(jnp.asarray, PARAMS)))
    assert all(isinstance(x, jax.Array) for x in leaves)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_a_training_loop_compiles_one_program():
    tx = accumulate(ADAMW, 3, skip_nonfinite="micro_batch")
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(jitted(tx).__wrapped__, n=1))
    params = jax.tree.map(jnp.asarray, PARAMS)
    drive(tx, gradients(7), params=params, step=step)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("k", [1, 2])
def test_init_takes_shapes_in_the_place_of_parameters(name, k):
    tx = accumulate(ADAMW, k, **OPTIONS[name])
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
    if "should_skip_update_fn" in OPTIONS[name]:
        found = jax.eval_shape(tx.init, shapes)  # that function computes with them
    else:
        found = tx.init(shapes)
    real = tx.init(PARAMS)
    assert signature(jax.tree.map(as_shape, found)) == signature(
        jax.tree.map(as_shape, real)
    )
    assert jax.tree.structure(found) == jax.tree.structure(real)


def as_shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def test_init_under_jit_is_init():
    tx = accumulate(ADAMW, 2, skip_nonfinite="window")
    compiled, eager = jax.jit(tx.init)(PARAMS), tx.init(PARAMS)
    assert_same_bits(compiled, eager)
    assert signature(compiled) == signature(eager)


def test_the_fields_are_named_as_promised_and_those_not_in_use_are_empty():
    fields = [
        "mini_step",
        "gradient_step",
        "inner_state",
        "acc_grads",
        "acc_weight",
        "acc_extra_args",
        "emitted",
        "skip_state",
        "skips",
        "grad_norm",
    ]
    assert list(AccumulateState._fields) == fields
    state = accumulate(SGD, 2).init(ZERO)
    assert state.skip_state == state.skips == state.grad_norm == ()
    assert accumulate(SGD, 1).init(ZERO).acc_grads == ()
    assert accumulate(SGD, 2, average_extra_args=()).init(ZERO).acc_extra_args == {}


def test_a_state_does_not_share_a_buffer_with_the_parameters():
    # optax.lookahead-like optimizers begin with the parameters in their state.
    keeping = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))
    params = jnp.ones(3)
    state = accumulate(keeping, 2).init(params)
    pointer = params.unsafe_buffer_pointer()
    assert state.inner_state.unsafe_buffer_pointer() != pointer


def test_weak_types_of_the_inner_state_are_made_strong():
    weak = optax.GradientTransformation(
        lambda _: {"rate": jnp.asarray(0.5), "python": 2.0, "numpy": np.float32(1)},
        lambda u, s, p=None: (u, jax.tree.map(lambda x: x * 2, s)),
    )
    tx = accumulate(weak, 1 + 1)
    start = signature(tx.init(ZERO))
    steps = drive(tx, [1.0] * 4)
    assert [signature(s.state) for s in steps] == [start] * 4
    assert steps[-1].state.inner_state == {"rate": 2, "python": 8, "numpy": 4}


@pytest.mark.parametrize(
    "opt",
    [
        optax.adam(0.1, mu_dtype=jnp.bfloat16),
        optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32),
        optax.contrib.schedule_free_adamw(0.1),
        optax.inject_hyperparams(optax.adam)(0.1),
    ],
    ids=["mu_dtype", "accumulator_dtype", "schedule-free", "inject_hyperparams"],
)
def test_the_inner_state_keeps_its_stored_dtypes(opt):
    for options in ({}, {"inner_dtype": jnp.float32}):
        tx = accumulate(lenient(opt), 2, **options)
        start = signature(tx.init(PARAMS))
        assert signature(drive(tx, gradients(4), params=PARAMS)[-1].state) == start


# --- checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["defaults", "skip windows"])
def test_a_run_restored_at_any_micro_step_ends_with_the_same_bits(tmp_path, name):  # C8
    tx = optax.chain(optax.clip(2.0), accumulate(ADAMW, 3, **OPTIONS[name]))
    step, grads = jitted(tx), gradients(7)
    params = {n: p for n, p in PARAMS.items() if p is not None}  # for Orbax's sake
    grads = [{n: g for n, g in gs.items() if g is not None} for gs in grads]
    given = {
        "weight": [np.float32(w) for w in (1, 2, 0.5, 3, 0, 1, 1)],
        "value": [np.float32(v) for v in range(7)],
    }
    straight = drive(tx, grads, params=params, step=step, **given)
    with ocp.StandardCheckpointer() as checkpointer:
        for i, stopped in enumerate(straight[:-1]):
            checkpointer.save(tmp_path / str(i), stopped._asdict())
            checkpointer.wait_until_finished()
            like = {"params": params, "state": tx.init(params)}
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            restored = Step(**checkpointer.restore(tmp_path / str(i), shapes))
            assert_same_bits(restored, stopped)
            assert signature(restored.state) == signature(stopped.state)
            for j in range(i + 1, 7):
                more = {name: values[j] for name, values in given.items()}
                restored = Step(*step(*restored, grads[j], **more))
            assert_same_bits(restored, straight[-1])


def test_a_state_survives_numpy_and_back():
    tx = accumulate(ADAMW, 3, skip_nonfinite="micro_batch")
    step, grads = jitted(tx), gradients(6)
    straight = drive(tx, grads, params=PARAMS, step=step)
    for i in range(5):
        saved = jax.tree.map(np.asarray, straight[i])
        assert_same_bits(Step(*step(*saved, grads[i + 1])), straight[i + 1])


def test_skipping_can_be_switched_on_for_a_state_that_was_made_without():
    steps = drive(accumulate(SGD, 3), [1.0])
    for mode, moved in (("micro_batch", -2.0), ("window", 0.0)):
        step = jitted(accumulate(SGD, 3, skip_nonfinite=mode))
        params, state = step(*steps[0], np.float32(NAN))
        params, state = step(params, state, np.float32(3))
        assert params == moved
        assert state.skips.total == 1


# --- from optax.MultiSteps -----------------------------------------------------------


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
    ("way", "skipping", "use_grad_mean"),
    [
        ("update", False, True),
        ("update", True, False),
        ("apply_gradients", False, False),
        ("apply_gradients", True, True),
    ],
)
def test_a_run_of_multisteps_can_be_taken_over_at_any_micro_step(
    way, skipping, use_grad_mean
):
    arguments = (optax.adam(0.1), 3, use_grad_mean, skip if skipping else None)
    old, new = optax.MultiSteps(*arguments), accumulate(*arguments)
    grads = gradients(7)
    if skipping:
        grads[4]["f32"][0] = np.nan
    theirs = drive(old.gradient_transformation(), grads, params=PARAMS, way="update")
    step = jitted(new, way)
    start = signature(new.init(PARAMS))
    for i in range(6):
        params, state = (
            theirs[i].params,
            from_multi_steps_state(theirs[i].state, use_grad_mean),
        )
        assert signature(state) == start
        assert bool(has_updated(state)) == bool(old.has_updated(theirs[i].state))
        for j in range(i + 1, 7):
            params, state = step(params, state, grads[j])
            assert signature(state) == start
            assert int(state.mini_step) == int(theirs[j].state.mini_step)
            assert int(state.gradient_step) == int(theirs[j].state.gradient_step)
        # A running mean of three against a sum and a reciprocal; in bfloat16 the last
        # bit of the mean may differ, and adam divides by its root.
        chex.assert_trees_all_close(
            params["f32"], theirs[-1].params["f32"], rtol=32 * EPS, atol=8 * EPS
        )
        chex.assert_trees_all_close(
            params["bf16"].astype(np.float32),
            theirs[-1].params["bf16"].astype(np.float32),
            rtol=2**-7,
        )


@pytest.mark.optax_promotes
def test_the_first_five_arguments_are_those_of_multisteps():
    ours = list(inspect.signature(accumulate).parameters.values())[:5]
    theirs = list(inspect.signature(optax.MultiSteps).parameters.values())
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


@pytest.mark.optax_promotes
def test_a_skip_state_of_nothing_is_taken_over_too():
    def never(*_):
        return jnp.zeros((), bool), ()

    old = optax.MultiSteps(SGD, 2, should_skip_update_fn=never)
    _, state = old.update(jnp.ones(()), old.init(ZERO), ZERO)
    new = accumulate(SGD, 2, should_skip_update_fn=never)
    updates, state = new.update(jnp.float32(3), from_multi_steps_state(state), ZERO)
    assert updates == -2
    assert state.skips == SkipCounts(0, 0)


# --- questions -----------------------------------------------------------------------


def test_metrics_are_found_in_any_state_and_are_scalars():
    tx = optax.chain(optax.clip(9.0), accumulate(SGD, 2, skip_nonfinite="micro_batch"))
    steps = drive(
        tx,
        [1.0, NAN, 3.0],
        weight=[np.float32(w) for w in (2, 3, 4)],
        value=[np.float32(v) for v in (5, 6, 7)],
    )
    found = [accumulation_metrics(s.state) for s in steps]
    assert [{n: float(x) for n, x in m.items()} for m in found] == [
        {
            "mini_step": mini_step,
            "gradient_step": gradient_step,
            "emitted": emitted,
            "weight": weight,
            "skipped": skipped,
            "consecutive_skipped": consecutive,
            "value": value,
        }
        for (
            mini_step,
            gradient_step,
            emitted,
            weight,
            skipped,
            consecutive,
            value,
        ) in [(1, 0, 0, 2, 0, 0, 5), (0, 1, 1, 2, 1, 1, 5), (1, 1, 0, 4, 1, 0, 7)]
    ]
    assert all(x.shape == () for m in found for x in m.values())
    assert set(accumulation_metrics(tx.init(ZERO))) == set(found[0])


def test_metrics_work_under_jit_and_where_nothing_is_skipped():
    state = drive(accumulate(SGD, 2), [1.0])[-1].state
    found = jax.jit(accumulation_metrics)(state)
    assert (found["mini_step"], found["skipped"], found["consecutive_skipped"]) == (
        1,
        0,
        0,
    )
    assert np.isnan(found["value"])


@pytest.mark.parametrize("mode", ["micro_batch", "should_skip_update_fn"])
def test_a_run_that_does_nothing_but_skip_can_be_stopped(mode):
    if mode == "micro_batch":
        tx = accumulate(SGD, 2, skip_nonfinite=mode)
    else:
        tx = accumulate(SGD, 2, should_skip_update_fn=lambda g, *_: (g != g, ()))
    steps = drive(optax.chain(tx), [NAN, NAN, 1.0, NAN, NAN, NAN])
    for step in steps[:5]:
        raise_if_skipping(step.state, limit=2)
    words = r"skipped 3 in a row, more than limit=2 \(5 in all\)"
    with pytest.raises(RuntimeError, match=words):
        raise_if_skipping(steps[5].state, limit=2)


def test_windows_that_are_given_up_are_counted_as_windows():
    tx = accumulate(SGD, 2, skip_nonfinite="window")
    steps = drive(tx, [NAN, NAN, 1.0, NAN, 1.0, 1.0])
    consecutive = [int(s.state.skips.consecutive) for s in steps]
    assert consecutive == [0, 1, 1, 2, 2, 0]
    with pytest.raises(RuntimeError, match="skipped 2 in a row"):
        raise_if_skipping(steps[4].state, limit=1)


def test_where_nothing_can_be_skipped_the_question_is_refused():
    with pytest.raises(ValueError, match="this accumulator skips nothing; give accum"):
        raise_if_skipping(accumulate(SGD, 2).init(ZERO), limit=1)


def test_every_combination_of_options_makes_a_step():
    # All that may be combined, for the errors that only a combination has.
    combinations = itertools.product(
        (True, False),
        (None, "micro_batch", "window"),
        ("mean", "sum"),
        (1, 2),
    )
    expected = {
        ("mean", True): -2,
        ("mean", False): -4,
        ("sum", True): -2,
        ("sum", False): -4,
    }
    for mean, skipping, reduction, k in combinations:
        tx = accumulate(
            SGD,
            k,
            mean,
            loss_reduction=reduction,
            skip_nonfinite=skipping,
        )
        state, updates = tx.init(ZERO), None
        for g in (1, 3):
            updates, state = tx.update(jnp.float32(g), state, ZERO)
        assert updates == (-3 if k == 1 else expected[reduction, mean])


def test_a_moved_parameter_and_has_updated_agree():
    steps = drive(accumulate(SGD, 3), [1.0] * 7)
    assert [bool(m) for m in moves(steps)] == [
        bool(has_updated(s.state)) for s in steps
    ]
