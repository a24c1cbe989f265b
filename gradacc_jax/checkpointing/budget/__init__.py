"""Choosing what to recompute under a budget in bytes: the story from top to bottom.

1. ``programs``: the function is traced, and nested calls are inlined, so that it is one
   list of operations on values.
2. ``needs``: JAX says which of the values the backward pass reads.
3. ``cuts``: the list is cut into segments where little crosses. How many segments are
   best is not known, so several ways are tried.
4. ``costs``, ``solve``: for every segment, what to save and what to compute again is a
   minimum cut; one price of a byte, swept, gives the best choice for any number of
   bytes. Equal segments are solved once.
5. ``planner``, ``combining``: of the choices of all segments come ``plans`` for the
   whole, from the smallest to the function as it is. A loop's body is a program of its
   own (``loops``); a long loop is made one of loops, or takes several turns at a time.
6. ``search``: some plans are compiled. Their bytes correct the predictions, until the
   cheapest that fits is found.
7. ``apply``: the function is run by the plan, by whichever engine keeps recomputation
   in place with the installed compiler (``selftest``).

``fitting`` does all this for a function (``traced``) and what is asked of it
(``request``), and ``report`` tells of it.
"""

from gradacc_jax.checkpointing.budget.fitting import (
    Fitted,
    TooSmallError,
    remat_to_fit,
)
from gradacc_jax.checkpointing.budget.report import (
    RematPoint,
    RematReport,
    RematSegment,
)
from gradacc_jax.checkpointing.budget.request import Request

__all__ = [
    "Fitted",
    "RematPoint",
    "RematReport",
    "RematSegment",
    "Request",
    "TooSmallError",
    "remat_to_fit",
]
