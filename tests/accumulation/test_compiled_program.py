"""What a micro-step costs, counted in the program that XLA makes of it.

A silent micro-step by ``apply_gradients`` is one addition: it reads the gradients, and
reads and writes the sums. Nothing that is as large as a parameter is copied, and the
inner optimizer's work is inside the conditional. Scalars (counters, weights, averages)
are not counted here: ``SCALARS`` bounds them.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, apply_gradients, references, train_step
from tests.lenient import lenient
from tests.programs import compiled, num_bytes, program

# Additions and selections of counters, the reciprocal of the weight, averaged extra
# arguments: some 12 operations were counted, whatever the parameters.
SCALARS = 32
# The arguments of these operations, and the tables of pointers that XLA keeps in
# temporaries: 644 bytes were the most that was counted.
FEW_BYTES = 1024

OPTIMIZERS = {"sgd": optax.sgd, "adamw": optax.adamw}
SIZES = (64, 256)


def tree_of(size, dtype=jnp.float32):
    return {
        "b": jnp.ones((size,), dtype),
        "v": jnp.ones((size, size), dtype),
        "w": jnp.ones((size, size), dtype),
    }


def bare(opt):
    return accumulate(opt, 4)


def in_chain(opt):
    return optax.chain(optax.clip(1.0), accumulate(opt, 4))


def in_partition(opt):
    return optax.partition(
        {"train": accumulate(opt, 4), "freeze": optax.set_to_zero()},
        {"b": "train", "v": "freeze", "w": "train"},
    )


PLACES = [bare, in_chain, in_partition]


def trained(place, params):
    return {k: p for k, p in params.items() if place != in_partition or k != "v"}


def micro_step(place, name, size, **kwargs):
    tx = place(lenient(OPTIMIZERS[name](0.1)))
    params = tree_of(size)
    state = tx.init(params)
    made = compiled(
        partial(apply_gradients, tx, **kwargs), params, state, params, donate=(0, 1)
    )
    return made, params, state


def bare_addition(place, params):
    """The one addition, overwriting where the window opens, of clipped gradients."""

    def add(total, grads, first):
        def leaf(t, g):
            g = jnp.clip(g, -1.0, 1.0) if place == in_chain else g
            return jnp.where(first, g, t + g)

        return jax.tree.map(leaf, total, grads)

    grads = trained(place, params)
    return compiled(add, grads, grads, jnp.array(False), donate=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_micro_step_copies_no_parameter_and_needs_no_temporaries(place, name):
    temporaries = []
    for size in SIZES:
        made, params, state = micro_step(place, name, size)
        # The least leaf has `size` elements; a row of a matrix has, too.
        assert made.copies(size) == 0
        assert made.temporaries < FEW_BYTES
        # All is updated in place, but for one flag that is not read (`emitted`).
        held = num_bytes(params) + num_bytes(state)
        assert held - 8 <= made.aliased <= held
        temporaries.append(made.temporaries)
    assert temporaries[0] == temporaries[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_outside_the_conditional_there_is_one_addition_for_each_sum(place, name):
    made, params, _ = micro_step(place, name, 256)
    assert made.conditionals == 1
    outermost = made.outermost(size=256)
    assert outermost.count("conditional") == 1
    # An addition is a fusion, or a call of one where XLA splits it between threads.
    additions = [x for x in outermost if x in ("fusion", "call")]
    assert len(additions) == len(trained(place, params))
    assert len(outermost) == len(additions) + 1


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_silent_micro_step_has_the_operations_of_the_bare_addition(place, name):
    silent, params, state = micro_step(place, name, 256, emit=False)
    addition = bare_addition(place, params)
    assert silent.conditionals == 0
    assert 0 <= silent.flops - addition.flops <= SCALARS
    assert 0 <= silent.accessed - addition.accessed <= FEW_BYTES
    floor = 12 * sum(p.size for p in trained(place, params).values())
    assert silent.accessed <= 1.01 * floor
    assert silent.copies(256) == 0
    assert silent.temporaries < FEW_BYTES
    held = num_bytes(params) + num_bytes(state)
    assert held - 8 <= silent.aliased <= held


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_an_emitting_micro_step_has_no_conditional_and_no_copies(place, name):
    emitting, _, _ = micro_step(place, name, 256, emit=True)
    assert emitting.conditionals == 0
    assert emitting.copies(256) == 0
    assert emitting.temporaries < FEW_BYTES


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_the_conditional_computes_nothing_twice(place, name):
    """Both of its branches and the addition are what the two static programs are."""
    either, _, _ = micro_step(place, name, 256)
    emitting, _, _ = micro_step(place, name, 256, emit=True)
    assert abs(either.flops - emitting.flops) <= SCALARS
    assert abs(either.accessed - emitting.accessed) <= FEW_BYTES


def test_a_weight_costs_one_multiplication_and_a_selection():
    params = tree_of(256)
    num_params = sum(p.size for p in params.values())
    tx = accumulate(optax.sgd(0.1), 4)

    def step(params, state, grads, weight):
        return apply_gradients(tx, params, state, grads, weight=weight, emit=False)

    args = (params, tx.init(params), params)
    weighted = compiled(step, *args, jnp.float32(3), donate=(0, 1))
    plain = compiled(partial(step, weight=None), *args, donate=(0, 1))
    # The product, and twice a selection: of weight 0, where the window opens and not.
    assert weighted.flops - plain.flops <= 3 * num_params + SCALARS
    assert abs(weighted.accessed - plain.accessed) <= FEW_BYTES
    assert weighted.copies(256) == 0
    assert weighted.temporaries < FEW_BYTES


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("route", ["update", "apply_gradients"])
def test_with_k_1_the_program_is_the_bare_optimizers(route, name, dtype):
    opt = lenient(OPTIMIZERS[name](0.1))
    params = tree_of(256, dtype)

    def two_calls(tx, params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = apply_gradients if route == "apply_gradients" else two_calls
    tx = accumulate(opt, 1)
    ours = compiled(partial(step, tx), params, tx.init(params), params, donate=(0, 1))
    optaxs = compiled(
        partial(two_calls, opt), params, opt.init(params), params, donate=(0, 1)
    )
    # The gradient step, and no more: 3 operations, some 100 bytes.
    assert 0 <= ours.flops - optaxs.flops <= 4
    assert 0 <= ours.accessed - optaxs.accessed <= 128
    assert 0 <= ours.temporaries - optaxs.temporaries <= 128
    assert ours.conditionals == 0
    assert ours.copies(256) == 0


def test_one_program_serves_a_whole_run_of_apply_gradients():
    tx = accumulate(lenient(optax.adamw(0.1)), 3)
    params = tree_of(4)
    state = tx.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    @chex.assert_max_traces(n=1)
    def step(params, state, grads):
        return apply_gradients(tx, params, state, grads)

    for i in range(7):
        grads = jax.tree.map(lambda p, i=i: jnp.full_like(p, i), tree_of(4))
        params, state = step(params, state, grads)
    assert step._cache_size() == 1
    assert state.gradient_step == 2


# A training step: layers in a scan, whose gradients would be stacked beside the sums.
NUM_LAYERS, WIDTH, BATCH = 8, 64, 2


def layered_loss(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w) + x, None

    y, _ = jax.lax.scan(layer, batch, params["layers"])
    return jnp.mean((y @ params["out"]) ** 2)


def layered_params(width=WIDTH):
    rng = np.random.default_rng(0)
    layers = rng.normal(0, width**-0.5, (NUM_LAYERS, width, width))
    return {
        "layers": jnp.asarray(layers, jnp.float32),
        "out": jnp.asarray(rng.normal(0, width**-0.5, (width, width)), jnp.float32),
    }


def batches(num, width=WIDTH):
    rng = np.random.default_rng(1)
    for _ in range(num):
        yield jnp.asarray(rng.normal(0, 1, (BATCH, width)), jnp.float32)


def layered_program(tx, width=WIDTH, **kwargs):
    params = layered_params(width)
    (batch,) = batches(1, width)
    step = train_step(layered_loss, tx)
    return program(step.lower(params, tx.init(params), batch, **kwargs))


def in_place(k=4, opt=optax.sgd):
    return accumulate(lenient(opt(0.1)), k)


def beside(k=4, opt=optax.sgd):
    """The same, where the gradients are made and then added."""
    return optax.chain(in_place(k, opt))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_micro_step_holds_no_gradient_tree_beside_the_sums(name):
    opt = OPTIMIZERS[name]
    tree = num_bytes(layered_params())
    ours, plain = layered_program(in_place(opt=opt)), layered_program(beside(opt=opt))
    assert ours.temporaries <= 0.6 * plain.temporaries
    # What is left are activations: the layers' gradients alone are 8 / 9 of the tree.
    assert ours.temporaries < 0.4 * tree < tree < plain.temporaries
    assert ours.copies(WIDTH * WIDTH) == 0
    assert ours.aliased >= plain.aliased


def test_a_training_micro_step_holds_one_layers_gradient_at_a_time():
    """The rest, but for that layer's weights, are activations: linear in the width."""

    def activations(width):
        one_layer = 4 * width * width
        return layered_program(in_place(), width).temporaries - 2 * one_layer

    assert 0 < activations(4 * WIDTH) <= 4 * activations(WIDTH)


def test_temporaries_do_not_depend_on_k():
    assert (
        layered_program(in_place(k=4)).temporaries
        == layered_program(in_place(k=64)).temporaries
    )


def test_a_silent_training_micro_step_has_no_conditional():
    assert layered_program(in_place(), emit=False).conditionals == 0


def test_gradients_made_in_place_and_beside_are_equal():
    # Momentum, so that the state carries a difference on.
    runs = {}
    for name, make in (("in place", in_place), ("beside", beside)):
        tx = make(3, partial(optax.sgd, momentum=0.9))
        params = layered_params()
        state = tx.init(params)
        step = train_step(layered_loss, tx, weight_fn=lambda batch: jnp.sum(batch > 0))
        losses = []
        for batch in batches(6):
            params, state, metrics = step(params, state, batch)
            losses.append(metrics.loss)
        assert step._cache_size() == 1
        runs[name] = (params, jnp.stack(losses))
    eps = np.finfo(np.float32).eps
    for a, b in zip(jax.tree.leaves(runs["in place"]), jax.tree.leaves(runs["beside"])):
        # Six sums of some 100 products each, in an order that XLA chooses: 8 eps of
        # the largest number.
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * eps * np.max(np.abs(b)))


def test_without_working_references_a_training_step_adds_gradients_beside(monkeypatch):
    served = layered_program(in_place())
    monkeypatch.setattr(references, "_work", lambda: False)
    fallen_back = layered_program(in_place())
    assert fallen_back.temporaries > num_bytes(layered_params()) > served.temporaries

    def run():
        tx = in_place(2)
        params = layered_params()
        state = tx.init(params)
        step = train_step(layered_loss, tx)
        for batch in batches(2):
            params, state, _ = step(params, state, batch)
        return params

    without = run()
    monkeypatch.undo()
    eps = np.finfo(np.float32).eps
    for a, b in zip(jax.tree.leaves(run()), jax.tree.leaves(without)):
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * eps * np.max(np.abs(b)))
