"""Is my accumulation equal to the whole batch, and if not, why?

The rooms, from the bottom: ``conditions`` (float64, still random numbers), ``report``
(what is found), ``experiments`` (a loss on any examples), ``diagnosis`` (why a loss on
micro-batches differs), ``loss`` (the first form); ``trial`` (a micro-step and the plain
optimizer, side by side), ``suspects`` (faults to re-enact), ``step`` (the second form);
``public`` (what a user calls).
"""

from gradacc_jax.equivalence.public import assert_equivalence, check_equivalence
from gradacc_jax.equivalence.report import Difference, EquivalenceReport

__all__ = [
    "Difference",
    "EquivalenceReport",
    "assert_equivalence",
    "check_equivalence",
]
