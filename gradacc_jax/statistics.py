"""Running statistics, such as batch normalisation's, when a batch comes in parts."""

import operator
from typing import Any

import numpy as np


def rescale_momentum(momentum: Any, k: int) -> float:
    r"""The momentum of a running mean that is updated k times where it was once.

    Batch normalisation keeps :math:`s \leftarrow m s + (1 - m) x`, with momentum m,
    once per batch. On k micro-batches it is updated k times a step, and forgets k times
    as fast: counted in examples its horizon shrinks to 1/k. With

    .. math:: m' = m^{1/k}

    what was there before a step keeps the share :math:`m'^k = m` after it. What stays
    different: each micro-batch is normalised by its own statistics, from fewer
    examples, so losses and gradients are not the full batch's. Group, layer or instance
    normalisation, which look at one example at a time, are.

    Args:
      momentum: that of a whole batch, in [0, 1]: the share of the old value that is
        kept (Flax's convention; PyTorch's is one minus that).
      k: the number of micro-batches in a step.

    Returns:
      The momentum for micro-batches, a float.

    Raises:
      ValueError: for a momentum outside [0, 1], or k below 1.

    Examples:
      >>> from gradacc_jax import rescale_momentum
      >>> round(rescale_momentum(0.9, 4), 4)
      0.974
    """
    try:
        count = operator.index(k)
    except TypeError:
        raise ValueError(f"k={k!r} is not an integer; choose at least 1") from None
    if count < 1 or isinstance(k, bool):
        raise ValueError(f"k={k!r} is not a number of micro-batches; choose at least 1")
    if not (np.ndim(momentum) == 0 and 0 <= momentum <= 1):
        raise ValueError(
            f"momentum={momentum!r} is not in [0, 1]; pass the share of the old value "
            "that is kept (0.9 in Flax is 0.1 in PyTorch)"
        )
    return float(momentum) ** (1 / count)
