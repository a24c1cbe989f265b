"""Policies are values: equal, hashable, combinable, and checked when they are given."""

import pickle

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

from gradacc_jax import policies, remat
from tests.checkpointing.models import residuals

X, W = jnp.ones((4, 3)), jnp.full((3, 3), 0.1)
ARGUMENTS = [((3, 3), "float32"), ((4, 3), "float32")]


def fun(x, w):
    """Three named values, each of which its consumer needs: squares and products."""
    a = checkpoint_name(jnp.sin(x @ w), "a")
    b = checkpoint_name((a * a).reshape(2, 6), "b").reshape(4, 3)
    return b * b * (a @ w)


def kept(policy, f=fun):
    """How many arrays are kept besides the arguments."""
    return len(residuals(remat(f, policy=policy), X, W)) - len(ARGUMENTS)


JAX = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("nothing_saveable", policies.full),
        ("everything_saveable", policies.none),
        ("checkpoint_dots", policies.dots),
        ("dots_with_no_batch_dims_saveable", policies.dots_with_no_batch_dims),
        ("recompute", policies.full),
        ("save_out_proj", policies.save_names("out_proj")),
        ("gradient_checkpointing", policies.full),
        (True, policies.full),
        (False, policies.none),
        (JAX.nothing_saveable, policies.full),
        (JAX.dots_saveable, policies.dots),
        (JAX.save_only_these_names("b", "a"), policies.save_names("a", "b")),
        (
            JAX.save_any_names_but_these("a"),
            policies.regex(".*") - policies.save_names("a"),
        ),
        (
            JAX.save_from_both_policies(
                JAX.dots_saveable, JAX.save_only_these_names("a")
            ),
            policies.dots | policies.save_names("a"),
        ),
        (
            JAX.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["b"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            policies.save_names("a") | policies.offload_names("b"),
        ),
    ],
)
def test_what_people_write_elsewhere_means_what_it_meant_there(text, meaning):
    assert policies.resolve(text) == meaning
    assert hash(policies.resolve(text)) == hash(meaning)


def test_a_policy_is_a_value_that_says_what_it_is_and_survives_pickling():
    policy = policies.dots | policies.save_names("b", "a") - policies.regex("a.*")
    again = policies.dots | policies.save_names("a", "b") - policies.regex("a.*")
    assert policy == again == pickle.loads(pickle.dumps(policy))
    assert {policy: 1}[again] == 1
    assert repr(policy) == "dots | (save_names('a', 'b') - regex('a.*'))"


def test_a_policy_is_what_jax_takes_as_one():
    keep = policies.save_names("a")
    assert len(residuals(jax.checkpoint(fun, policy=keep), X, W)) == 3
    assert len(residuals(jax.checkpoint(fun, policy=policies.full), X, W)) == 2


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        ("full", 0),
        ("dots", 2),  # both products; a square is made again from what it squares
        (policies.save_names("a"), 1),
        (policies.save_names("a", "b"), 2),
        (policies.save_names("a", "b") - policies.save_names("b"), 1),
        (policies.regex("[ab]"), 2),
        (policies.regex("[ab]") - policies.regex("[ab]"), 0),
        (policies.save_names("a") | policies.offload_names("b"), 2),
        (policies.dots - policies.dots_with_no_batch_dims, 0),
    ],
)
def test_as_many_values_are_kept_as_the_policy_says(policy, count):
    assert kept(policy) == count


def test_everything_but_a_name_does_not_keep_what_the_name_was_put_on():
    # x -> sin, cos -> a, a @ w -> b (in two shapes) -> b * b
    everything = residuals(remat(fun, policy=policies.none - policies.full), X, W)
    without_b = residuals(remat(fun, policy=policies.save_all_but("b")), X, W)
    with_jax = residuals(jax.checkpoint(fun, policy=policies.save_all_but("b")), X, W)
    # Reshaped, b and the value it was put on are one array of (4, 3), and kept as such.
    assert len(with_jax) == len(everything)
    assert len(without_b) == len(everything) - 1


@pytest.mark.parametrize("within", ["scan", "jit", "cond"])
def test_a_value_is_withheld_inside_control_flow_too(within):
    def looped(x, w):
        if within == "scan":
            return jax.lax.scan(lambda x, _: (fun(x, w), None), x, None, length=3)[0]
        if within == "jit":
            return jax.jit(fun)(x, w)
        return jax.lax.cond(x[0, 0] > 0, fun, lambda x, w: x @ w, x, w)

    everything = residuals(remat(looped, policy=policies.none - policies.full), X, W)
    withheld = residuals(remat(looped, policy=policies.save_all_but("b")), X, W)
    assert len(withheld) < len(everything)
    loss = lambda f: lambda w: jnp.sum(f(X, w))  # noqa: E731
    found = jax.grad(loss(remat(looped, policy=policies.save_all_but("b"))))(W)
    assert jnp.allclose(found, jax.grad(loss(looped))(W), rtol=1e-6)


def test_a_name_that_is_offloaded_wins_over_a_rule_that_saves_everything():
    both = policies.none | policies.offload_names("a")
    made = jax.make_jaxpr(jax.grad(lambda w: remat(fun, policy=both)(X, w).sum()))(W)
    assert "device_put" in str(made)


def test_one_name_cannot_go_two_ways():
    with pytest.raises(ValueError, match="'a' both in device and in pinned_host"):
        policies.save_names("a", "b") | policies.offload_names("a")
    with pytest.raises(ValueError, match="both in device"):
        policies.regex("a.*") | policies.offload_names("ab")
    patterns = policies.regex("a.*") | policies.regex(".*a", to="pinned_host")
    with pytest.raises(ValueError, match="both in device"):
        kept(patterns)  # found out when it meets the name


@pytest.mark.parametrize(
    ("policy", "error", "what"),
    [
        (None, ValueError, 'say "full"'),
        ("dotz", ValueError, "did you mean 'dots'"),
        (JAX.save_only_these_names, TypeError, "was not called"),
        (policies.save_names, TypeError, r'write policies.save_names\("name"\)'),
        (JAX.save_anything_except_these_names("a"), ValueError, "save_all_but"),
        (3, TypeError, "is a int"),
    ],
)
def test_what_is_no_policy_is_refused_when_it_is_given(policy, error, what):
    with pytest.raises(error, match=what):
        remat(fun, policy=policy)


def test_a_function_that_makes_policies_is_refused_when_given_or_when_asked():
    def factory(*names):
        return lambda prim, *avals, **params: False

    with pytest.raises(TypeError, match="if it makes policies, call it"):
        remat(fun, policy=factory)
    with pytest.raises(TypeError, match="it makes policies"):
        kept(lambda *names, **options: factory())


def test_a_function_of_the_user_is_a_policy():
    def sines(prim, *avals, **params):
        return prim.name == "sin"

    assert kept(sines) == 1


@pytest.mark.parametrize(
    "make", [policies.save_names, policies.save_all_but, policies.offload_names]
)
def test_names_are_needed_and_are_strings(make):
    with pytest.raises(ValueError, match="no name"):
        make()
    with pytest.raises(TypeError, match="each a string"):
        make(["a", "b"])


def test_a_misspelt_name_is_warned_about_with_the_names_there_are():
    misspelt = remat(fun, policy=policies.save_names("A", "b"))
    with pytest.warns(UserWarning, match="name 'A'; did you mean 'a'.*'a', 'b'"):
        misspelt(X, W)


def test_a_pattern_that_matches_nothing_is_warned_about():
    with pytest.warns(UserWarning, match="no name matches the pattern 'c.*'"):
        remat(fun, policy=policies.dots - policies.regex("c.*"))(X, W)


def test_a_name_within_a_rule_for_derivatives_counts_as_seen():
    @jax.custom_vjp
    def attention(x):
        return jnp.sin(x)

    def forward(x):
        return jnp.sin(x), checkpoint_name(jnp.cos(x), "context")

    attention.defvjp(forward, lambda cos, g: (g * cos,))
    remat(attention, policy=policies.save_names("context"))(X)  # warnings are errors


def test_routing_decisions_are_kept_by_every_policy():
    def route(x, w):
        scores, experts = jax.lax.top_k(x @ w, 2)
        order = jnp.argsort(scores[:, 0])
        return (jax.nn.softmax(scores) * w[experts, 0])[order]

    shapes = residuals(remat(route), X, W)
    assert ((4, 2), "int32") in shapes
    assert any(dtype == "int32" and shape[0] == 4 for shape, dtype in shapes)
    plain = residuals(jax.checkpoint(route), X, W)
    assert ((4, 2), "int32") not in plain
