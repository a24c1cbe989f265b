"""Ctrl-C and SIGTERM as a question asked between micro-steps, not as an accident."""

import signal
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Remembers a signal that asks the run to stop, while its `with` block lasts.

    The micro-step under way is finished and a checkpoint written. A second signal acts
    as it always does, for those who cannot wait.

    Attributes:
        signal: the number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        # None is a handler that JAX's runtime may have set, outside Python.
        self._previous = {
            s: signal.signal(s, self._remember) or signal.SIG_DFL for s in STOPPING
        }
        return self

    def agreed(self, *, between_steps: bool) -> int | None:
        """The signal that came, to whichever process: the same answer in all of them.

        Several processes ask each other at the end of a step only, where they have to
        wait for each other in any case.
        """
        if jax.process_count() == 1:
            return self.signal
        if not between_steps:
            return None
        came = multihost_utils.process_allgather(np.int32(self.signal or 0))
        return int(np.max(came)) or None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for stopping in STOPPING:
            signal.signal(stopping, self._previous[stopping])
