"""Which bytes a micro-batch holds, and how many of its targets carry a loss."""

import dataclasses
import sysconfig

import numpy as np
import pytest

from gradacc_jax.cli.settings import CommandError, Settings
from gradacc_jax.cli.text import SEPARATOR, Documents, load_corpus

SEQ_LEN = 8
SETTINGS = Settings(seq_len=SEQ_LEN, micro_batch=3, num_microbatches=4, global_batch=12)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a.txt", "sub/b.txt", "sub/c.txt", "sub/deep/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.integers(1, 256, 60 + len(name), np.uint8).tobytes())
    return tmp_path


def test_a_sequence_carries_loss_up_to_the_end_of_its_document():
    data = b"abc\0defghijklmnop\0q\0"
    documents = Documents.from_bytes(data)
    starts = np.arange(documents.starts(SEQ_LEN))
    batch = documents.batch(starts, SEQ_LEN)
    for start, sequence, length in zip(starts, *batch):
        assert sequence.tobytes() == data[start : start + SEQ_LEN + 1]
        # The oracle: walk on until the separator was predicted.
        expected = 0
        while expected < SEQ_LEN and data[start + expected] != SEPARATOR:
            expected += 1
        assert length == expected
    assert (batch.sequences.dtype, batch.lengths.dtype) == (np.uint8, np.int32)


def test_sequences_can_start_everywhere_that_a_whole_one_fits():
    documents = Documents.from_bytes(b"abcdefgh\0")
    assert documents.starts(SEQ_LEN) == 1
    assert documents.batch(np.array([0]), SEQ_LEN).lengths == [SEQ_LEN]
    assert documents.starts(SEQ_LEN + 1) == 0


def test_a_micro_batch_is_a_function_of_the_seed_and_its_index(folder):
    first, again = (load_corpus([str(folder)], SEQ_LEN) for _ in range(2))
    assert first.sha256 == again.sha256
    for index in (0, 7):
        for a, b in zip(
            first.micro_batch(SETTINGS, index), again.micro_batch(SETTINGS, index)
        ):
            np.testing.assert_array_equal(a, b)
    here = first.micro_batch(SETTINGS, 0).sequences
    assert (here != first.micro_batch(SETTINGS, 1).sequences).any()
    other = dataclasses.replace(SETTINGS, seed=1)
    assert (here != first.micro_batch(other, 0).sequences).any()


def test_a_global_batch_is_the_micro_batches_of_its_window(folder):
    corpus = load_corpus([str(folder)], SEQ_LEN)
    whole = corpus.global_batch(SETTINGS, 2)
    parts = [corpus.micro_batch(SETTINGS, index) for index in (8, 9, 10, 11)]
    for i, part in enumerate(parts):  # strided, as a step splits it
        np.testing.assert_array_equal(whole.sequences[i::4], part.sequences)
        np.testing.assert_array_equal(whole.lengths[i::4], part.lengths)


def test_micro_batches_have_unequal_weights(folder):
    corpus = load_corpus([str(folder)], SEQ_LEN)
    weights = {corpus.micro_batch(SETTINGS, i).lengths.sum() for i in range(20)}
    assert len(weights) > 1
    assert max(weights) <= 3 * SEQ_LEN


def test_the_held_out_tail_is_never_trained_on(folder):
    text = b"".join(b"%05d\n" % i for i in range(100))
    (folder / "numbers.txt").write_bytes(text)
    corpus = load_corpus([str(folder / "numbers.txt")], SEQ_LEN)
    train, held_out = (d.data.tobytes() for d in (corpus.train, corpus.held_out))
    assert train[:-1] + held_out[:-1] == text
    assert 0.04 * len(text) < len(held_out) < 0.06 * len(text)
    batches = list(corpus.held_out_batches(SETTINGS, limit=2))
    assert 1 <= len(batches) <= 2
    for batch in batches:
        assert all(sequence.tobytes() in held_out for sequence in batch.sequences)


def test_a_short_text_is_all_trained_on(folder):
    corpus = load_corpus([str(folder / "a.txt")], SEQ_LEN)
    assert not len(corpus.held_out.data)
    assert not list(corpus.held_out_batches(SETTINGS, limit=2))


def test_a_folder_is_read_whole_but_for_hidden_binary_and_empty_files(folder):
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no")
    (folder / "image.bin").write_bytes(b"\0\1\2")
    (folder / "empty.txt").touch()
    corpus = load_corpus([str(folder)], SEQ_LEN)
    assert corpus.num_files == 4
    assert corpus.num_bytes == sum(
        (folder / name).stat().st_size
        for name in ("a.txt", "sub/b.txt", "sub/c.txt", "sub/deep/d.txt")
    )


def test_the_default_text_is_the_library_of_this_python():
    corpus = load_corpus([], 128)
    assert corpus.num_files > 100
    assert 1_000_000 < corpus.num_bytes <= 16_000_000
    everything = corpus.train.data.tobytes() + corpus.held_out.data.tobytes()
    with open(f"{sysconfig.get_path('stdlib')}/shlex.py", "rb") as file:
        assert file.read(2000) in everything


def test_an_empty_text_is_an_error(tmp_path):
    (tmp_path / "empty.txt").touch()
    for path in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(CommandError, match="holds no text; name files"):
            load_corpus([str(path)], SEQ_LEN)


def test_a_text_shorter_than_one_sequence_is_told_what_would_fit(tmp_path):
    (tmp_path / "short.txt").write_text("seven b")
    with pytest.raises(CommandError, match=r"7 bytes, .*; .* --seq-len at most 7"):
        load_corpus([str(tmp_path)], SEQ_LEN)
    assert load_corpus([str(tmp_path)], 7).train.starts(7) == 1


def test_a_text_that_is_not_there_or_not_text_is_an_error(tmp_path):
    with pytest.raises(CommandError, match="gone cannot be read: No such file"):
        load_corpus([str(tmp_path / "gone")], SEQ_LEN)
    (tmp_path / "image.bin").write_bytes(b"\0" * 100)
    with pytest.raises(CommandError, match="holds a zero byte"):
        load_corpus([str(tmp_path / "image.bin")], SEQ_LEN)
