"""What a loss function returns, taken apart and checked while tracing."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def pair_of(out: Any, has_aux: bool, what: str = "(loss, aux)") -> tuple[Any, PyTree]:
    """``out`` as a pair; what it has beside the loss is ``()`` without aux."""
    if not has_aux:
        return out, ()
    if not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"the loss function returned {type(out).__name__}, expected the pair {what}"
            "; return one, or pass has_aux=False"
        )
    return out


def check_loss(loss: Any) -> None:
    """Raises unless ``loss`` is one real scalar."""
    if not is_leaf(loss):
        raise ValueError(
            f"the loss function returned {type(loss).__name__} for a loss, expected a "
            "scalar; to return (loss, aux) pass has_aux=True"
        )
    if jnp.shape(loss) != ():
        raise ValueError(
            f"the loss function returned a loss of shape {jnp.shape(loss)}; expected a "
            "scalar: take the mean over the loss terms"
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"the loss function returned a loss of dtype {jnp.result_type(loss)}; "
            "expected a real floating scalar"
        )


def loss_and_aux(out: Any, has_aux: bool) -> tuple[jax.Array, PyTree]:
    """What a loss function returned, as a checked loss and its aux."""
    loss, aux = pair_of(out, has_aux)
    check_loss(loss)
    return loss, aux


def is_leaf(x: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
