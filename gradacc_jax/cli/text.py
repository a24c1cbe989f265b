"""Text as bytes: which files are read, and which bytes each micro-batch holds.

Documents stand one after another, each ended by a separator byte. A sequence may start
anywhere. It belongs to the document in which it starts: targets past that document's
end carry no loss. So no loss depends on another document, nothing is padded, and
micro-batches have honestly unequal weights.

The sequences of an optimizer step are a pure function of the seed and the step's
number, whatever they are cut into: its micro-batches are one part after another. So a
stopped run needs only to know how many sequences it has seen to go on exactly where it
was, be it with other micro-batches or on another number of devices.
"""

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import hashlib
import math
import os
from pathlib import Path
import sysconfig
from typing import NamedTuple

import numpy as np

from gradacc_jax.cli.settings import CommandError, Settings

SEPARATOR = 0  # The one byte that no text file holds.
DEFAULT_TEXT_BYTES = 16_000_000
DEFAULT_TEXT_SUFFIXES = (".py", ".rst", ".txt", ".md", ".html")
# Not the library's own text, or tables of numbers.
DEFAULT_TEXT_WITHOUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
HELD_OUT_FRACTION = 0.05


class Batch(NamedTuple):
    """What the model trains on.

    Attributes:
        sequences: uint8 `(batch, seq_len + 1)`; all but the last byte are inputs, all
            but the first are targets.
        lengths: int32 `(batch,)`; how many targets, from the first, carry a loss.
    """

    sequences: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents one after another, each ended by a separator byte."""

    data: np.ndarray
    ends: np.ndarray

    @classmethod
    def from_bytes(cls, data: bytes) -> "Documents":
        array = np.frombuffer(data, np.uint8)
        return cls(array, np.flatnonzero(array == SEPARATOR))

    def starts(self, seq_len: int) -> int:
        """The number of places where a sequence can start."""
        return max(0, len(self.data) - seq_len)

    def batch(self, starts: np.ndarray, seq_len: int) -> Batch:
        """The sequences that start at `starts`.

        The target at a document's end is its separator, which is worth predicting. The
        targets after it belong to another document.
        """
        sequences = self.data[starts[:, None] + np.arange(seq_len + 1)]
        to_the_end = self.ends[np.searchsorted(self.ends, starts)] - starts
        return Batch(sequences, np.minimum(to_the_end, seq_len).astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text of a run: what it trains on and what it is tested on.

    Attributes:
        train: the documents that micro-batches come from.
        held_out: the tail that training never sees; may be too short to be used.
        num_files: how many files were read.
        num_bytes: how many bytes they held.
        sha256: a digest of all of it, for `--resume`.
    """

    train: Documents
    held_out: Documents
    num_files: int
    num_bytes: int
    sha256: str

    def micro_batch(self, settings: Settings, index: int) -> Batch:
        """The sequences of micro-step `index`, on all devices: always the same."""
        step, number = divmod(index, settings.num_microbatches)
        starts = self._window(settings, step)[number]
        return self.train.batch(starts, settings.seq_len)

    def global_batch(self, settings: Settings, step: int) -> Batch:
        """All micro-batches of optimizer step `step`, from 0.

        They are interleaved as `train_step` splits a batch: of k micro-batches, i has
        every k-th sequence, from i on. So every device has the same micro-batches as
        when it gets them one by one.
        """
        starts = self._window(settings, step).T.ravel()
        return self.train.batch(starts, settings.seq_len)

    def _window(self, settings: Settings, step: int) -> np.ndarray:
        """Where the sequences of a step start, a row for each of its micro-steps."""
        rng = np.random.default_rng((settings.seed, step))
        places = self.train.starts(settings.seq_len)
        starts = rng.integers(0, places, settings.global_batch)
        return starts.reshape(settings.num_microbatches, -1)

    def call_batch(self, settings: Settings, index: int) -> Batch:
        """What the call that begins with micro-step `index` trains on."""
        if settings.in_step:
            return self.global_batch(settings, index // settings.num_microbatches)
        return self.micro_batch(settings, index)

    def held_out_batches(self, settings: Settings, limit: int) -> Iterator[Batch]:
        """At most `limit` batches, spread evenly over the held-out text."""
        size, seq_len = settings.sequences_in_micro_step, settings.seq_len
        places = self.held_out.starts(seq_len)
        count = min(limit, math.ceil(places / (size * seq_len)))
        starts = np.linspace(0, places - 1, count * size).astype(np.int64)
        for part in starts.reshape(count, size):
            yield self.held_out.batch(part, seq_len)


def load_corpus(paths: Sequence[str], seq_len: int) -> Corpus:
    """Reads files and folders; without any, the standard library of this Python.

    Raises:
        CommandError: there is no text, or less than one sequence of it.
    """
    named = f"--text {' '.join(paths)}" if paths else "the default text"
    documents = _read(paths) if paths else _standard_library()
    num_bytes = sum(map(len, documents))
    if not documents:
        raise CommandError(f"{named} holds no text; name files that are not empty")
    separator = bytes([SEPARATOR])
    data = separator.join(documents) + separator
    if len(data) <= seq_len:
        raise CommandError(
            f"{named} holds {num_bytes} bytes, less than one sequence of --seq-len="
            f"{seq_len}; give more text or choose --seq-len at most {len(data) - 1}"
        )
    tail = int(len(data) * HELD_OUT_FRACTION)
    cut = len(data) - (tail if tail > seq_len else 0)
    # The cut goes through a document, which becomes two.
    return Corpus(
        Documents.from_bytes(data[:cut].removesuffix(separator) + separator),
        Documents.from_bytes(data[cut:]),
        len(documents),
        num_bytes,
        hashlib.sha256(data).hexdigest(),
    )


def _read(paths: Sequence[str]) -> list[bytes]:
    """The text files among `paths` and in the folders among them."""
    documents = []
    for path in map(Path, paths):
        if path.is_dir():
            documents += [text for _, text in _folder(path) if SEPARATOR not in text]
            continue
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CommandError(
                f"--text {path} cannot be read: {error.strerror}"
            ) from error
        if SEPARATOR in text:
            raise CommandError(
                f"--text {path} holds a zero byte, so it is not text; leave it out"
            )
        documents.append(text)
    return [text for text in documents if text]


def _standard_library() -> list[bytes]:
    """Source and documentation of the Python that runs this, a bounded part of it."""
    documents: list[bytes] = []
    room = DEFAULT_TEXT_BYTES
    library = Path(sysconfig.get_path("stdlib"))
    for path, text in _folder(library, DEFAULT_TEXT_WITHOUT):
        if path.suffix in DEFAULT_TEXT_SUFFIXES and text and SEPARATOR not in text:
            room -= len(text)
            if room < 0:
                break
            documents.append(text)
    return documents


def _folder(
    folder: Path, without: Collection[str] = ()
) -> Iterator[tuple[Path, bytes]]:
    """The files below `folder`, in an order any part of which is a fair sample.

    Hidden files and folders are passed over, folders named in `without`, and files
    that may not be read.
    """
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if name[0] != "." and name not in without
        ]
        found += [Path(parent, name) for name in files if name[0] != "."]

    def order(path: Path) -> bytes:
        name = path.relative_to(folder).as_posix()
        return hashlib.sha256(os.fsencode(name)).digest()

    for path in sorted(found, key=order):
        if path.is_file() and os.access(path, os.R_OK):
            yield path, path.read_bytes()
