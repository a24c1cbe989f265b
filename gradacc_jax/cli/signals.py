"""Ctrl-C and SIGTERM as a question asked between micro-steps, not as an accident."""

import signal
from types import FrameType, TracebackType
from typing import Any

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
        self._previous = {s: signal.signal(s, self._remember) for s in STOPPING}
        return self

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
