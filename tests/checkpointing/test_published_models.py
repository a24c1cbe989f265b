"""Models that others published, at small sizes with random weights.

They bring hundreds of packages along and so are no requirement of the tests:
``pip install google-tunix`` and ``pip install --no-deps 'gemma<3'``, then
``pytest -m published_models``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax import remat_modules
from tests.checkpointing.models import quick, residual_bytes

pytestmark = [
    pytest.mark.published_models,
    pytest.mark.optax_promotes,  # they do
    # Theirs, and none of our business.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]
TOKENS = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
POSITIONS = jnp.broadcast_to(jnp.arange(6), (2, 6))
MASK = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6))


@pytest.fixture(autouse=True)
def lenient_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def check(forward, again, params):
    """The same logits and gradients, and fewer bytes kept."""

    def run(forward):
        loss = lambda p: jnp.mean(jnp.square(forward(p).astype(jnp.float32)))  # noqa: E731
        return quick(jax.value_and_grad(loss), params)

    expected, found = run(forward), run(again)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        scale = max(1e-3, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)
    assert residual_bytes(again, params) < 0.7 * residual_bytes(forward, params)


def test_gemma_of_linen():
    why = "gemma is not installed: pip install --no-deps 'gemma<3'"
    gemma = pytest.importorskip("gemma.transformer", reason=why)
    modules = pytest.importorskip("gemma.modules", reason=why)
    config = gemma.TransformerConfig(
        num_layers=4,
        num_embed=32,
        embed_dim=16,
        hidden_dim=32,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(modules.AttentionType.GLOBAL,) * 4,
    )
    model = gemma.Transformer(config)
    arguments = (TOKENS, POSITIONS, None, MASK)
    params = model.init(jax.random.key(0), *arguments)
    new = remat_modules(model)
    again = new.init(jax.random.key(0), *arguments)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    check(
        lambda p: model.apply(p, *arguments)[0],
        lambda p: new.apply(p, *arguments)[0],
        params,
    )
    assert list(new.rematerialised) == [f"layer_{i}" for i in range(4)]


def test_llama_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    why = "google-tunix is not installed"
    llama = pytest.importorskip("tunix.models.llama3.model", reason=why)
    config = llama.ModelConfig(
        num_layers=4,
        vocab_size=32,
        embed_dim=16,
        hidden_dim=32,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    new = remat_modules(model)
    assert list(new.rematerialised) == [f"layers/{i}" for i in range(4)]
    _, params = nnx.split(model)

    def forward(model):
        graph, _ = nnx.split(model)
        return lambda params: nnx.merge(graph, params, copy=True)(
            TOKENS, POSITIONS, None, MASK
        )[0]

    check(forward(model), forward(new), params)
