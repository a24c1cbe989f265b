"""``remat_modules``: a new model, the same but for what the forward pass keeps."""

from flax import linen as nn
from flax import nnx
import jax.numpy as jnp
import pytest

from gradacc_jax import policies, remat_modules
from tests.checkpointing.models import (
    RNGS,
    LinenBlock,
    LinenModel,
    NnxBlock,
    NnxModel,
    equal,
    init,
    inputs,
    outputs,
    plain,
    residual_bytes,
)

X = inputs()


def kept(model, variables):
    forward = lambda p: outputs(model, {**variables, "params": p})[0]  # noqa: E731
    return residual_bytes(forward, variables["params"])


class Lists(nn.Module):
    """Blocks made in setup, beside layers that are no blocks."""

    def setup(self):
        self.layers = [LinenBlock() for _ in range(2)]
        self.first, self.last = nn.Dense(8), nn.Dense(3)

    def __call__(self, x, train):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, train=train, activation="gelu")
        return self.last(x)


class ScannedClass(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return LinenBlock()(x, train=train), None

        scanned = nn.scan(
            Body,
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )
        return scanned()(x, None)[0]


@pytest.mark.parametrize(
    ("model", "match", "paths"),
    [
        (LinenModel(), None, ["LinenBlock_0", "LinenBlock_1"]),
        (LinenModel(), LinenBlock, ["LinenBlock_0", "LinenBlock_1"]),
        (LinenModel(), "*_1", ["LinenBlock_1"]),
        (LinenModel(scan=True), LinenBlock, ["LinenBlock_0"]),
        (Lists(), None, ["layers_0", "layers_1"]),
        (ScannedClass(), None, ["ScanBody_0"]),
        (ScannedClass(), "**/LinenBlock_0", ["ScanBody_0/LinenBlock_0"]),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_linen_model_computes_the_same_and_keeps_less(model, match, paths):
    variables = init(model)
    new = remat_modules(model, match=match)
    equal(init(new), variables)
    expected = outputs(model, variables, capture_intermediates=True)
    equal(outputs(new, variables, capture_intermediates=True), expected)
    assert list(new.rematerialised) == paths
    assert kept(new, variables) < kept(model, variables)
    assert type(new).__name__ == type(model).__name__


def test_blocks_may_have_policies_of_their_own():
    model = LinenModel()
    variables = init(model)
    match = {"LinenBlock_0": "dots", LinenBlock: policies.save_names("hidden")}
    new = remat_modules(model, match=match)
    outputs(new, variables)
    assert new.rematerialised == {
        "LinenBlock_0": policies.dots,
        "LinenBlock_1": policies.save_names("hidden"),
    }


def test_a_model_that_was_traced_before_keeps_less_all_the_same():
    class Jitted(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x, _):
            for _ in range(2):
                x = LinenBlock()(x, True)
            return x

    model = Jitted()
    variables = init(model)
    before = kept(model, variables)
    assert kept(remat_modules(model, match=LinenBlock), variables) < before
    assert kept(remat_modules(model), variables) < before
    assert kept(model, variables) == before


def test_a_block_of_a_parent_that_one_did_not_write_gets_every_keyword():
    class Strict(nn.Module):
        @nn.compact
        def __call__(self, x, *, mask, train, mode="x"):
            assert train is True
            assert mode == "fast"
            assert type(self).__name__ == "Strict"
            return nn.Dense(8)(x) * mask

    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = jnp.ones((8,))[None]
            for _ in range(2):
                x = Strict()(x, mask=mask, train=True, mode="fast")
            return x

    equal(remat_modules(Parent()).init(RNGS, X), Parent().init(RNGS, X))


def test_a_part_of_another_linen_model_works_with_rules():
    class Whole(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(8)(self.part(x, train))

    whole = Whole(LinenModel())
    variables = init(whole)
    new = Whole(remat_modules(LinenModel(), match=LinenBlock))
    equal(outputs(new, variables), outputs(whole, variables))
    assert kept(new, variables) < kept(whole, variables)


def test_what_matches_nothing_is_an_error_with_what_there_is():
    new = remat_modules(LinenModel(), match="LinenBlok_0")
    with pytest.raises(ValueError, match="did you mean 'LinenBlock_0'"):
        init(new)
    with pytest.raises(ValueError, match="no repeated blocks in LinenBlock"):
        remat_modules(LinenBlock()).init(RNGS, X)
    with pytest.raises(ValueError, match="did you mean 'blocks/0'"):
        remat_modules(NnxModel(nnx.Rngs(0)), match="block/0")


def test_a_bound_model_and_what_is_no_model_are_refused():
    model = LinenModel()
    bound = model.bind(init(model))
    with pytest.raises(ValueError, match="bound to variables"):
        remat_modules(bound)
    for other in (LinenModel, lambda x: x):
        with pytest.raises(TypeError, match="expected a model"):
            remat_modules(other)
    for match in ([], {3: "full"}):
        with pytest.raises((TypeError, ValueError), match="match="):
            remat_modules(model, match=match)


@pytest.mark.parametrize(
    "match", [None, NnxBlock, "blocks/*", {"blocks/0": "dots", NnxBlock: "full"}]
)
def test_an_nnx_model_computes_the_same_and_keeps_less(match):
    model = NnxModel(nnx.Rngs(0))
    new = remat_modules(model, match=match)

    def forward(model):
        graph, state = nnx.split(model)
        merged = lambda s: nnx.merge(graph, s, copy=True)(X)  # noqa: E731
        return residual_bytes(merged, state)

    assert forward(new) < forward(model)
    assert list(new.rematerialised) == ["blocks/0", "blocks/1"]
    assert plain(nnx.state(new)).keys() == plain(nnx.state(model)).keys()
    equal(new(X), model(X))
    equal(plain(nnx.state(new)), plain(nnx.state(model)))
    assert new.blocks[0] is not model.blocks[0]
    assert type(model.blocks[0]) is NnxBlock


def test_linen_blocks_to_be_found_in_a_bound_model_or_a_part_must_be_named():
    class Head(nn.Module):
        backbone: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(self.backbone(x, False))

    model = remat_modules(LinenModel())
    variables = init(LinenModel())
    with pytest.raises(ValueError, match="a part of another one, say which: match="):
        model.bind(variables)(X, False)
    with pytest.raises(ValueError, match="a part of another one, say which: match="):
        Head(model).init(RNGS, X)
