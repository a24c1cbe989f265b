"""What the backward pass keeps, and where it comes from."""

import functools
import inspect
import math

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

from gradacc_jax import remat_sequence, residual_report
from gradacc_jax.checkpointing.residuals import kept_bytes

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


KEY = jax.eval_shape(lambda: jax.random.key(0))


def line_of(text, function):
    """Where a line of a function of this file stands."""
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


def rows(report, kind):
    return [row for row in report.residuals if row.kind == kind]


def by_jax(fun, *args):
    """The bytes that JAX hands over, by its public API."""
    kept = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept))


def dense(w, x):
    return jnp.tanh(x @ w)


def noisy(x, key):
    keep = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(keep, x, 0.0)


def model(params, x, key, wrap=lambda f: f):
    for i in range(3):
        x = wrap(block)(params[i], x, jax.random.fold_in(key, i))
    return jnp.sum(x**2)


def block(p, x, key):
    h = jax.nn.gelu(x @ p["up"].astype(jnp.bfloat16))
    h = noisy(h, key)
    return x + checkpoint_name(h @ p["down"].astype(jnp.bfloat16), "out")


PARAMS = [{"up": shape(16, 64), "down": shape(64, 16)}] * 3
ARGS = PARAMS, shape(8, 16, dtype=jnp.bfloat16), KEY


def test_bytes_are_those_that_jax_hands_over():
    for fun, args in [(dense, (shape(16, 16), shape(8, 16))), (model, ARGS[:2])]:
        if fun is model:
            fun = functools.partial(model, key=jax.random.key(0))
        both = residual_report(fun, *args, argnums=(0, 1))
        total = both.total_bytes + both.argument_bytes
        # Scalars that the program has as literals are no arrays.
        assert 0 <= by_jax(fun, *args) - total <= 64


def test_arguments_are_told_from_what_is_computed():
    report = residual_report(dense, shape(16, 16), shape(8, 16), argnums=(0, 1))
    assert {(r.origin, r.nbytes) for r in rows(report, "argument")} == {
        ("w", 16 * 16 * 4),
        ("x", 8 * 16 * 4),
    }
    assert report.argument_bytes == 16 * 16 * 4 + 8 * 16 * 4
    computed = rows(report, "computed")
    assert {(r.shape, r.dtype) for r in computed} == {((8, 16), "float32")}
    assert report.total_bytes == len(computed) * 8 * 16 * 4


def test_only_what_the_gradient_of_argnums_needs_is_kept():
    report = residual_report(dense, shape(16, 16), shape(8, 16))
    assert [r.origin for r in rows(report, "argument")] == ["x"]
    report = residual_report(dense, shape(16, 16), shape(8, 16), argnums=-1)
    assert [r.origin for r in rows(report, "argument")] == ["w"]


def test_copies_of_parameters_masks_constants_and_names_are_told():
    report = residual_report(model, *ARGS)
    copies = {(r.origin, r.dtype) for r in rows(report, "copy")}
    # The first layer's input needs no gradient, so its "up" is not kept.
    assert copies == {
        (f"params[{i}]['{name}'], by convert_element_type", "bfloat16")
        for i, name in [(0, "down"), (1, "up"), (1, "down"), (2, "up"), (2, "down")]
    }
    masks = rows(report, "random")
    assert [(r.shape, r.dtype, r.nbytes) for r in masks] == [((8, 64), "bool", 512)] * 3
    assert all(r.shape == (8, 64) for r in rows(report, "constant"))

    sources = {r.kind: r.source for r in report.residuals}
    assert sources["random"].endswith(f":{line_of('bernoulli', noisy)} (noisy)")
    line = line_of('"down"', block)
    assert any(r.source.endswith(f":{line} (block)") for r in rows(report, "copy"))


def test_a_named_value_is_called_by_its_name():
    def named(w, x):
        return jnp.sin(checkpoint_name(x @ w, "product"))

    policy = jax.checkpoint_policies.save_only_these_names("product")
    for report in (
        residual_report(named, shape(4, 4), shape(2, 4), policy=policy),
        residual_report(
            lambda w, x: jax.checkpoint(named, policy=policy)(w, x),
            shape(4, 4),
            shape(2, 4),
        ),
    ):
        (row,) = rows(report, "computed")
        assert (row.origin, row.nbytes) == ("named 'product'", 32)


def test_a_loop_over_layers_is_looked_into():
    def loss(params, x, key):
        def step(carry, p):
            x, key = carry
            key, mine = jax.random.split(key)
            return (block(p, x, mine), key), None

        (x, _), _ = jax.lax.scan(step, (x, key), params)
        return jnp.sum(x**2)

    stacked = {"up": shape(5, 16, 64), "down": shape(5, 64, 16)}
    report = residual_report(loss, stacked, *ARGS[1:])
    masks = [r for r in rows(report, "random") if r.dtype == "bool"]
    assert [(r.shape, r.loops) for r in masks] == [((5, 8, 64), 5)]
    assert masks[0].source.endswith(f":{line_of('bernoulli', noisy)} (noisy)")
    # The inputs of the layers: the batch at first, then what a layer made.
    inputs = [r for r in report.residuals if r.shape == (5, 8, 16)]
    assert inputs
    assert {r.kind for r in inputs} == {"computed"}
    copies = {r.origin for r in rows(report, "copy")}
    assert "params['down'], by convert_element_type" in copies
    assert {r.loops for r in rows(report, "copy")} == {5}


def test_lines_of_library_functions_are_the_lines_that_call_them():
    def first(x):
        return jax.nn.softmax(x)

    def second(x):
        return jax.nn.softmax(x * 2)

    jax.make_jaxpr(first)(shape(4))  # traced before, and kept by JAX
    report = residual_report(second, shape(4))
    assert report.residuals
    line = line_of("softmax", second)
    assert {
        r.source.rpartition(" ")[0].rpartition(":")[2] for r in report.residuals
    } == {str(line)}


def test_lines_of_a_flax_module_are_the_users():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.tanh(nn.Dense(4)(x))

    net = Net()
    variables = jax.eval_shape(net.init, KEY, shape(2, 4))
    report = residual_report(net.apply, variables, shape(2, 4))
    computed = rows(report, "computed")
    assert computed
    for row in computed:
        assert row.source.endswith("(Net.__call__)"), row


def test_conditionals_custom_derivatives_and_jit_are_looked_into():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, jnp.cos(x)), lambda kept, g: (2 * g * kept / kept,))

    def loss(w, x):
        y = jax.jit(dense)(w, x)
        y = jax.lax.cond(y[0, 0] > 0, jnp.sin, jnp.exp, y)
        return jnp.sum(double(y))

    report = residual_report(loss, shape(4, 4), shape(2, 4))
    assert {"argument", "computed"} == {r.kind for r in report.residuals} - {"constant"}
    assert "cos" in {r.origin for r in report.residuals}
    assert any(r.source.endswith("(dense)") for r in report.residuals)


def test_nothing_is_computed_and_concrete_arguments_do_as_well():
    def huge(w, x):
        return jnp.tanh(x @ w)

    report = residual_report(huge, shape(2**20, 2**20), shape(2**20, 2**20))
    assert report.total_bytes >= 2**42  # four TiB
    concrete = residual_report(dense, jnp.ones((4, 4)), jnp.ones((2, 4)))
    abstract = residual_report(dense, shape(4, 4), shape(2, 4))
    assert concrete == abstract


# --- policies and regions ------------------------------------------------------------


def test_a_policy_is_reported_with_what_is_computed_again():
    before = residual_report(model, *ARGS)
    after = residual_report(functools.partial(model, wrap=jax.checkpoint), *ARGS)
    assert before.num_regions == 0
    assert before.recomputed_bytes == 0
    assert after.num_regions == 3
    assert after.total_bytes < before.total_bytes / 4
    # One block of three, which is differentiated with respect to its input too.
    assert before.total_bytes / 4 < after.recomputed_bytes < before.total_bytes / 2
    dots = jax.checkpoint_policies.dots_saveable
    some = residual_report(
        functools.partial(model, wrap=functools.partial(jax.checkpoint, policy=dots)),
        *ARGS,
    )
    assert after.total_bytes < some.total_bytes < before.total_bytes
    assert some.recomputed_bytes < after.recomputed_bytes


def test_a_loss_wrapped_as_a_whole_is_said_to_save_nothing():
    before = residual_report(model, *ARGS)
    for report in (
        residual_report(jax.checkpoint(model), *ARGS),
        residual_report(model, *ARGS, policy="full"),
    ):
        assert report.total_bytes == 0
        assert report.recomputed_bytes >= before.total_bytes
        assert "saves nothing" in str(report)
    blocks = residual_report(functools.partial(model, wrap=jax.checkpoint), *ARGS)
    assert "saves nothing" not in str(blocks)


def test_regions_in_a_loop_count_as_often_as_it_turns():
    def loss(w, x, segments):
        return jnp.sum(remat_sequence(dense_of, x, stacked=w, segments=segments))

    def dense_of(x, w):
        return dense(w, x)

    args = shape(12, 4, 4), shape(2, 4)
    for segments, num in ((12, 12), (4, 4), (5, 4)):
        report = residual_report(functools.partial(loss, segments=segments), *args)
        assert report.num_regions == num


def test_kept_bytes_counts_arguments_on_request():
    one = 8 * 16 * 4
    without = kept_bytes(dense, shape(16, 16), shape(8, 16))
    assert kept_bytes(dense, shape(16, 16), shape(8, 16), counted=(1,)) == without + one


# --- tables and plots ----------------------------------------------------------------


def test_the_table_has_the_largest_first_and_equal_rows_together():
    text = str(residual_report(model, *ARGS)).splitlines()
    assert text[0].startswith("residuals of model: ")
    assert text[1].split() == ["bytes", "shape", "kind", "origin", "source"]
    assert any("3 x" in line and "random" in line for line in text)
    assert "alive anyway" in text[-1]
    assert all(line == line.rstrip() for line in text)


def test_sizes_have_three_digits():
    for elements, size in [
        (100, "400 B"),
        (256, "1.00 KiB"),
        (2**18 + 2**12, "1.02 MiB"),
    ]:
        report = residual_report(
            lambda x, y: x * jnp.sin(y), shape(elements), shape(elements)
        )
        assert str(report).splitlines()[0].endswith(f": {size}")


def test_two_reports_are_compared_and_plotted():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    before = residual_report(model, *ARGS)
    after = residual_report(functools.partial(model, wrap=jax.checkpoint), *ARGS)
    table = before.compare(after).splitlines()
    assert table[0].split() == ["residual", "before", "after"]
    assert table[-2].startswith("kept")
    assert table[-1].startswith("computed again")
    figure = before.plot(after)
    bars = [bar.get_width() for bar in figure.axes[0].containers[1]]
    total = after.total_bytes + after.recomputed_bytes
    assert sum(bars) * 2**20 == pytest.approx(total)
    bars = [bar.get_width() for bar in before.plot().axes[0].containers[0]]
    assert sum(bars) * 2**20 == pytest.approx(before.total_bytes)
    plt.close("all")


def test_an_argument_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="argnums=2 names argument 2, and there are 2"):
        residual_report(dense, shape(4, 4), shape(2, 4), argnums=2)
