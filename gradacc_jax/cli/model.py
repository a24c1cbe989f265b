"""A byte-level decoder transformer in Flax nnx, with its layers stacked and scanned.

Pre-norm blocks, rotary positions, causal attention, no biases, and one embedding that
reads bytes in and scores them out. All layers share one compiled body: their
parameters carry a leading axis of length `num_layers`, and `jax.lax.scan` walks it.

The model is used as a pure function: `create` splits it once into a graph definition
and a plain dict of arrays, which is what optax, `train_step` and Orbax want to see.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import optax

from gradacc_jax import remat_sequence
from gradacc_jax.cli.settings import Settings, resolve_remat
from gradacc_jax.cli.text import SEPARATOR, Batch

NUM_BYTES = 256
# The values of a block that --remat can name.
NAMES = ("query_key_value", "attention", "mlp_in")
# The axis of a layer's matrix that --model-parallel devices share: of the first product
# its outputs (whole heads), of the second its inputs, so that a layer needs two sums.
SHARED_AXES = {"query_key_value": -1, "attention_out": -2, "mlp_in": -1, "mlp_out": -2}

PyTree = Any
Params = dict[str, Any]
Forward = Callable[[Params, jax.Array], jax.Array]


def rotary(x: jax.Array) -> jax.Array:
    """Turns pairs of channels by angles that grow with the position (RoPE).

    Args:
        x: `(batch, position, head, channel)`, with an even number of channels.

    Returns:
        The same shape and dtype. Inner products of two results depend on positions
        only through their distance.
    """
    positions, half = x.shape[1], x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(positions, dtype=jnp.float32), frequency)
    cos = jnp.cos(angle).astype(x.dtype)[None, :, None, :]
    sin = jnp.sin(angle).astype(x.dtype)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention in which no position sees a later one.

    Scores and their softmax are float32 whatever the dtype of the arguments.
    """
    positions, channels = q.shape[1], q.shape[-1]
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones((positions, positions), bool))[None, None]
    scores = jnp.where(seen, scores * channels**-0.5, -jnp.inf)
    return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores).astype(v.dtype), v)


class Block(nnx.Module):
    """One layer: attention, then a multilayer perceptron, each added to its input."""

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, embed_dim, dtype=dtype, rngs=rngs)
        # 2 * num_layers terms are added to the residual stream. Scaled like this, their
        # sum starts with the variance of one of them, at any depth.
        residual_init = nnx.initializers.variance_scaling(
            0.5 / num_layers, "fan_in", "normal"
        )
        self.num_heads = num_heads
        self.attention_norm = norm()
        self.query_key_value = linear(embed_dim, 3 * embed_dim)
        self.attention_out = linear(embed_dim, embed_dim, kernel_init=residual_init)
        self.mlp_norm = norm()
        self.mlp_in = linear(embed_dim, 4 * embed_dim)
        self.mlp_out = linear(4 * embed_dim, embed_dim, kernel_init=residual_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, positions, channels = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        qkv = checkpoint_name(qkv, "query_key_value")
        q, k, v = jnp.split(qkv.reshape(batch, positions, self.num_heads, -1), 3, -1)
        attended = causal_attention(rotary(q), rotary(k), v)
        attended = checkpoint_name(attended, "attention")
        x = x + self.attention_out(attended.reshape(batch, positions, channels))
        inner = checkpoint_name(self.mlp_in(self.mlp_norm(x)), "mlp_in")
        return x + self.mlp_out(jax.nn.gelu(inner))


class Transformer(nnx.Module):
    """Bytes in, one float32 score for each possible next byte out."""

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        *,
        num_tokens: int = NUM_BYTES,
        remat: str = "none",
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.segments, self.policy = resolve_remat(remat, num_layers, NAMES)

        def block(rngs: nnx.Rngs) -> Block:
            return Block(num_layers, embed_dim, num_heads, dtype=dtype, rngs=rngs)

        self.embed = nnx.Embed(
            num_tokens,
            embed_dim,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.blocks = nnx.vmap(block)(rngs.split(num_layers))
        self.final_norm = nnx.RMSNorm(embed_dim, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps `(batch, position)` integers to `(batch, position, token)` logits."""
        graphdef, stacked = nnx.split(self.blocks)

        def layer(x: jax.Array, layer_params: PyTree) -> jax.Array:
            return nnx.merge(graphdef, layer_params)(x)

        x = remat_sequence(
            layer,
            self.embed(tokens.astype(jnp.int32)),
            stacked=stacked,
            segments=self.segments,
            policy=self.policy,
        )
        return self.embed.attend(self.final_norm(x)).astype(jnp.float32)


def create(settings: Settings) -> tuple[Forward, Params]:
    """Makes the model of a run: a pure `forward(params, tokens)` and its parameters."""
    # One program, instead of one for every little operation of the init.
    return forward(settings), jax.jit(functools.partial(init, settings))()


def init(settings: Settings) -> Params:
    """The parameters that a run begins with; to be compiled."""
    params: Params = nnx.to_pure_dict(nnx.state(_make(settings)))
    return params


def forward(settings: Settings) -> Forward:
    """The model as a pure function `forward(params, tokens)`; makes no parameters."""
    shapes = nnx.eval_shape(functools.partial(_make, settings))
    graphdef, _ = nnx.split(shapes)

    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens)

    return forward


def _make(settings: Settings) -> Transformer:
    return Transformer(
        settings.num_layers,
        settings.embed_dim,
        settings.num_heads,
        remat=settings.remat,
        dtype=jnp.bfloat16 if settings.bf16 else jnp.float32,
        rngs=nnx.Rngs(settings.seed),
    )


def next_byte_loss(forward: Forward, params: Params, batch: Batch) -> jax.Array:
    """Mean cross-entropy in nats over the targets of `batch` that bear a loss.

    The mean of no targets is 0.
    """
    inputs, targets = batch.sequences[:, :-1], batch.sequences[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        forward(params, jnp.asarray(inputs)), targets.astype(jnp.int32)
    )
    bears_loss = jnp.arange(targets.shape[1])[None] < batch.lengths[:, None]
    return jnp.sum(losses, where=bears_loss) / jnp.maximum(weight(batch), 1.0)


def weight(batch: Batch) -> jax.Array:
    """The number of loss-bearing targets of `batch`, a float32 scalar."""
    return jnp.sum(batch.lengths).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("forward", "length"))
def sample(
    forward: Forward,
    params: Params,
    prompt: jax.Array,
    key: jax.Array,
    length: int,
    temperature: float = 0.8,
) -> jax.Array:
    """Continues `prompt` by `length` bytes, drawn one at a time.

    The model always sees as many bytes as the prompt has: a window that slides. That
    costs a forward pass of that length for every byte, and no cache in the model.
    """

    def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = forward(params, window[None])[0, -1]
        # The text has ended where a separator stands: draw something to print instead.
        logits = logits.at[SEPARATOR].set(-jnp.inf)
        byte = jax.random.categorical(key, logits / temperature).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    _, drawn = jax.lax.scan(next_byte, prompt, jax.random.split(key, length))
    return drawn
