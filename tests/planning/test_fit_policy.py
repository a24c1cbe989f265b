"""The policy that is made for a limit, where a loss has no policies of its own."""

import itertools
import types

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from gradacc_jax import plan, train_step
from gradacc_jax.planning import search
from gradacc_jax.planning.fitted import FIT
from gradacc_jax.planning.search import FIT_TRIES

pytestmark = pytest.mark.newest  # remat_to_fit is experimental

LAYERS, WIDTH, BATCH = 4, 32, 64
WEIGHTS = {
    "in": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32),
    "out": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32),
}
PARAMS = [WEIGHTS] * LAYERS
EXAMPLES = jax.ShapeDtypeStruct((BATCH, 64, WIDTH), jnp.float32)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def loss_fn(params, x):
    for w in params:
        x = x + jnp.sin(jnp.tanh(x @ w["in"])) @ w["out"]
    return jnp.mean(x**2)


def planned(memory, **options):
    return plan(loss_fn, PARAMS, OPTIMIZER, EXAMPLES, memory=memory, **options)


def rows(found, policy):
    return [c for c in found.candidates if c.policy == policy]


@pytest.fixture(scope="module")
def found():
    """A plan in which one example fits as it is, and two by computing again."""
    with jax.numpy_dtype_promotion("strict"):
        return planned("1650KB")


def test_what_does_not_fit_as_it_is_fits_by_computing_again_and_is_faster(found):
    assert found.policy == FIT
    assert found.peak_bytes <= found.limit_bytes
    assert found.microbatch_size * found.num_microbatches == BATCH
    known = [c for c in rows(found, "none") if c.memory is not None]
    fitting = [c for c in known if c.memory.peak <= found.limit_bytes]
    assert len(known) > len(fitting) > 0
    assert all(c.microbatch_size < found.microbatch_size for c in fitting)
    assert all(c.seconds > found.seconds for c in fitting)
    # Of each micro-batch it tries, at most eight and the one that is chosen.
    assert found.compiles <= 8 + 9 * FIT_TRIES


def test_the_step_is_that_of_the_full_batch(found):
    rng = np.random.default_rng(0)

    def drawn(x):
        return jnp.asarray(rng.normal(size=x.shape) / 8, x.dtype)

    params = jax.tree.map(drawn, PARAMS)
    x = drawn(EXAMPLES)
    grads = jax.grad(loss_fn)(params, x)
    updates, _ = OPTIMIZER.update(grads, OPTIMIZER.init(params), params)
    wanted = optax.apply_updates(params, updates)
    given = jax.tree.map(jnp.copy, params)
    params, _, metrics = found.train_step(given, found.tx.init(given), x)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(wanted)):
        # 64 examples are summed in another order: some 100 eps of float32.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert not metrics.skipped


def test_the_note_says_how_to_make_such_a_step_by_hand(found):
    (note,) = [note for note in found.notes if note.startswith("policy fit")]
    limit = int(note.partition("max_temp_bytes=")[2].partition(")")[0])
    step = train_step(
        loss_fn,
        OPTIMIZER,
        num_microbatches=found.num_microbatches,
        max_temp_bytes=limit,
    )
    state = jax.eval_shape(OPTIMIZER.init, PARAMS)
    memory = step.lower(PARAMS, state, EXAMPLES).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= limit == found.candidates[0].memory.temporaries


def test_where_larger_micro_batches_are_no_faster_it_is_not_compiled():
    found = planned("50MiB")
    assert found.policy == "none"
    (row,) = rows(found, FIT)
    assert row.memory is None
    assert row.verdict == "not compiled: no faster at its best"


def test_it_is_asked_for_by_its_name_and_left_out_by_naming_others(found):
    assert not rows(planned("1650KB", policies=("none",)), FIT)
    alone = planned("1650KB", policies=(FIT,))
    assert alone.to_json() == found.to_json()


def test_too_little_memory_is_an_error_that_names_its_smallest_need():
    with pytest.raises(ValueError, match="the smallest need, of micro-batch 1 "):
        planned("300KiB", policies=(FIT,))


def test_it_keeps_to_the_time_budget(monkeypatch, found):
    # A second passes with each compilation, until it is in those for this policy.
    clock = types.SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(search, "time", clock)
    before = sum(c.policy == "none" and c.memory is not None for c in found.candidates)
    told = []
    short = planned("1650KB", time_budget=before + 1.5, progress=told.append)
    assert "policy fit" in told[-1]
    assert short.policy == "none"
    assert short.compiles < found.compiles
    assert any("time budget was spent" in note for note in short.notes)


def test_with_much_memory_it_is_the_step_as_it_is():
    assert planned("50MiB", policies=(FIT,)).policy == "none"


def test_on_a_mesh_it_does_not_stand_alone():
    mesh = AbstractMesh((4,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct(EXAMPLES.shape, jnp.float32, sharding=rows)
    with pytest.raises(ValueError, match='the batch is spread over 4; add "none"'):
        plan(loss_fn, PARAMS, OPTIMIZER, x, memory="50MiB", policies=(FIT,))
