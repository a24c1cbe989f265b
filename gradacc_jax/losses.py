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


def check_terms(loss: PyTree, weight: PyTree, named: bool) -> None:
    """Raises unless the loss fits its weight, or each of its terms has one."""
    if not named:
        check_loss(loss)
        if weight is not None and weight.shape != ():
            raise ValueError(
                f"weight_fn returned shape {weight.shape}; expected a scalar, the "
                "number of loss terms in the micro-batch: sum your mask"
            )
        return
    for path, w in jax.tree_util.tree_leaves_with_path(weight):
        if w.shape != ():
            raise ValueError(
                f"weight_fn returned shape {w.shape} at {jax.tree_util.keystr(path)}; "
                "expected scalars, the number of loss terms of each term"
            )
    terms: Any = jax.tree.structure(loss)
    weights = jax.tree.structure(weight)
    if terms != weights or not terms.num_leaves:
        raise ValueError(
            f"weight_fn returned {weights} and the loss function {terms}; each term of "
            "the loss needs its weight"
        )
    for term in jax.tree.leaves(loss):
        check_loss(term)


def is_leaf(x: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
