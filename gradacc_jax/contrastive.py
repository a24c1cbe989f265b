r"""Losses that couple the whole batch, in the memory of one chunk.

A contrastive loss compares every example with every other one, so it is no mean over
micro-batches, and no accumulator can make the step of the full batch from them. But it
sees the examples through their representations only, which are small. For chunks
:math:`c` of the batch, with representations :math:`z_c = f(\theta, x_c)`,

.. math::
    \frac{dL}{d\theta} =
        \sum_c \Big(\frac{\partial z_c}{\partial \theta}\Big)^T
        \frac{\partial L}{\partial z_c}:

the loss and :math:`\partial L / \partial z` need all representations, but what lies
between the parameters and one :math:`z_c` needs one chunk. So the encoder runs chunk by
chunk and keeps nothing but its outputs; the backward pass runs a chunk again when it
comes to it. Gao et al. (2021) do this by hand in two passes, as GradCache; with JAX it
is a loop over rematerialised chunks, inside a loss that is otherwise written as ever.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from gradacc_jax import arguments, precision, splitting
from gradacc_jax.checkpointing import policies
from gradacc_jax.splitting import Part

PyTree = Any


def chunked_encode(
    encode: Callable[..., Any],
    chunk_size: int,
    *,
    policy: Any = "full",
    batch_argnums: int | Sequence[int] = 1,
    batch_axis: PyTree = 0,
    key_argnums: int | Sequence[int] = (),
    state_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    r"""``encode``, a chunk of the batch at a time, for use inside a full-batch loss.

    The result takes the place of ``encode`` in a loss that is differentiated with
    ``jax.value_and_grad`` as ever: contrastive losses, of two towers or of one, and any
    other loss of representations. Value and gradient are the full batch's.

    Args:
      encode: ``encode(params, batch) -> representations``, with other arguments as
        needed. The representations are a pytree of arrays with a leading axis of
        examples, in any dtype. Those of one example must not depend on the others in
        its chunk.
      chunk_size: how many examples are encoded at once. The last chunk has what is left
        (10 in 4, 4, 2); a batch that is no larger makes one chunk. A batch that is
        sharded over D devices stays where it is if D divides ``chunk_size`` and
        ``chunk_size`` divides the batch; otherwise examples are moved.
      policy: what the backward pass need not compute again: "full" (rematerialisation:
        nothing is kept), "none" (everything is), or what ``policies.resolve`` takes,
        JAX's own policies too. What is kept, is kept of every chunk.
      batch_argnums: which positional arguments are batches.
      batch_axis: the examples' axis: an integer, or a pytree prefix of the batch; None
        marks what is not batched. With several batch arguments, also a tuple of one for
        each.
      key_argnums: arguments that are PRNG keys; chunk i gets ``fold_in(key, i)``, in
        both of its passes.
      state_argnums: arguments that are carried from chunk to chunk, such as batch
        statistics: ``encode`` then returns ``(representations, new_state)``, and so
        does the result. (A tuple of argnums: a tuple.) No gradient flows through them.

    Returns:
      A function of the arguments of ``encode`` with its results. Any argument can be
      differentiated, in forward and reverse mode; keyword arguments are passed on as
      they are. Memory of a gradient: one chunk's residuals, all representations, and
      one sum per differentiated number, in at least float32 (the parameters of bfloat16
      that ``encode`` closes over are summed in bfloat16: pass them as arguments); where
      ``encode`` scans its layers, also one chunk's gradients. Time: one forward pass
      more.

    Raises:
      ValueError: at construction for options that make no sense; while tracing for
        batches that do not fit each other, and for results of ``encode`` that are not
        representations of the chunk's examples.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from gradacc_jax import chunked_encode
      >>> def tower(w, x):
      ...     z = jnp.tanh(x @ w)
      ...     return z / jnp.linalg.norm(z, axis=1, keepdims=True)
      >>> def loss(w, a, b, encode=tower):
      ...     logits = encode(w, a) @ encode(w, b).T
      ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))
      >>> def loss_in_chunks(w, a, b):
      ...     return loss(w, a, b, chunked_encode(tower, 3))
      >>> w, a, b = jax.random.normal(jax.random.key(0), (3, 8, 8))
      >>> found, expected = jax.grad(loss_in_chunks)(w, a, b), jax.grad(loss)(w, a, b)
      >>> print(jnp.allclose(found, expected, atol=1e-6))
      True

    References:
      Gao et al., `Scaling Deep Contrastive Learning Batch Size under Memory Limited
      Setup <https://arxiv.org/abs/2101.06983>`_, 2021.
    """
    roles = {
        "batch_argnums": arguments.positions("batch_argnums", batch_argnums),
        "key_argnums": arguments.positions("key_argnums", key_argnums),
        "state_argnums": arguments.positions("state_argnums", state_argnums),
    }
    arguments.check_roles(roles)
    batches, keys, states = roles.values()
    size = arguments.count("chunk_size", chunk_size)
    if not isinstance(size, int):
        raise ValueError(
            f"chunk_size={chunk_size!r} is not known while tracing; pass a Python "
            "integer, at least 1"
        )
    kept = policies.resolve(policy)

    @functools.wraps(encode)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments.check_given((*batches, *keys, *states), args)
        for number in keys:
            arguments.check_key(number, args[number])
        batch = tuple(args[number] for number in batches)
        one_axis = len(batch) == 1 or not isinstance(batch_axis, tuple)
        axes = splitting.batch_axes(
            batch, (batch_axis,) * len(batch) if one_axis else batch_axis
        )
        num_examples = splitting.num_examples(batch, axes)
        if num_examples == 0:
            raise ValueError("batch_size=0: there is nothing to encode")
        shared = _Shared(args, dict(zip(batches, axes)), batch)

        def chunk(part: Part, state: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            given = shared.read()
            micro = tuple(given[number] for number in batches)
            micro = splitting.micro_batch(micro, axes, part, i)
            for number, value in zip((*batches, *states), (*micro, *state)):
                given[number] = value
            for number in keys:
                given[number] = jax.random.fold_in(args[number], part.first + i)
            out = encode(*given, **kwargs)
            new = ()
            if states:
                out, new = _pair_of(out)
                new = arguments.states(new, isinstance(state_argnums, int))
                arguments.check_state(state, new)
            _check_representations(out, part.size)
            return lax.stop_gradient(new), out

        state = jax.tree.map(jnp.asarray, tuple(args[number] for number in states))
        state = lax.stop_gradient(state)
        outs = []
        for part in splitting.parts(num_examples, None, min(size, num_examples)):
            body = jax.checkpoint(functools.partial(chunk, part), policy=kept)
            state, out = lax.scan(body, state, jnp.arange(part.count))
            outs.append(out)
        representations = jax.tree.map(lambda *x: splitting.joined(x), *outs)
        if not states:
            return representations
        return representations, state[0] if isinstance(state_argnums, int) else state

    return run


class _Shared:
    """The arguments that every chunk reads, above all the parameters.

    The backward loop adds up their cotangents, in their dtypes: 512 chunks with a
    gradient of 1 come to 256 in bfloat16. So a narrow one gets a float32 twin outside
    the loop, to which inside it the cotangents go. A twin has derivatives only, and no
    value that a chunk would read: nothing but the sum is kept in float32.

    Inside ``shard_map`` they are made to vary over the devices as the batch does, which
    is where JAX puts the sum over devices: after the loop, and not once a chunk.
    """

    def __init__(
        self, args: tuple[Any, ...], axes: dict[int, PyTree], batch: tuple[Any, ...]
    ):
        """Takes all arguments; ``axes`` are those of the ones that are batches."""
        varying = frozenset[str]().union(*map(_varying, jax.tree.leaves(batch)))
        self.leaves, self.tree = jax.tree.flatten(args)
        batched = [
            axis >= 0
            for n, arg in enumerate(args)
            for axis in jax.tree.leaves(axes.get(n, jax.tree.map(lambda _: -1, arg)))
        ]
        self.twins: list[Any] = [None] * len(batched)
        for n, x in enumerate(self.leaves):
            if batched[n] or not isinstance(x, (jax.Array, np.ndarray)):
                continue
            if not precision.has_gradient(x):
                continue
            missing = tuple(sorted(varying - _varying(x)))
            x = lax.pcast(jnp.asarray(x), missing, to="varying")
            self.leaves[n] = x
            if (wide := precision.working_dtype(x.dtype)) != x.dtype:
                self.twins[n] = _twin(x, wide)
                self.leaves[n] = lax.stop_gradient(x)

    def read(self) -> list[Any]:
        """The arguments as one chunk sees them; call it inside the loop."""
        leaves = [
            x if twin is None else _differentiated_as(x, twin)
            for x, twin in zip(self.leaves, self.twins)
        ]
        return list(jax.tree.unflatten(self.tree, leaves))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _twin(x: jax.Array, dtype: Any) -> jax.Array:
    """Something of the shape of ``x`` with the derivatives of ``x.astype(dtype)``."""
    return jnp.zeros_like(x, dtype=dtype)


@_twin.defjvp
def _(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _twin(*primals, dtype), tangents[0].astype(dtype)


@jax.custom_jvp
def _differentiated_as(x: jax.Array, twin: jax.Array) -> jax.Array:
    """The value ``x``, with the derivatives of its ``twin``."""
    return x


@_differentiated_as.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _differentiated_as(*primals), tangents[1].astype(primals[0].dtype)


def _varying(x: Any) -> frozenset[str]:
    """The axes of ``shard_map`` over which an array differs between devices."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _pair_of(out: Any) -> tuple[PyTree, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"encode returned {type(out).__name__}, expected the pair "
            "(representations, new_state); return it, or leave out state_argnums"
        )
    return out


def _check_representations(out: PyTree, size: int) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(out):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] != size:
            raise ValueError(
                f"encode returned {jax.tree_util.keystr(path) or 'an array'} of shape "
                f"{jnp.shape(x)} for a chunk of {size} examples; its first axis must "
                "be that of the examples: leave what couples them to the loss"
            )
