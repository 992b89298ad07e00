"""Where tokens come from."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jettison.core.errors import UsageError
from jettison.train.data import Batches, Corpus, ShuffledOrder, TextDigest, open_corpus
from jettison.train.recipe import DataSection


def whole(corpus: Corpus) -> TextDigest:
    return TextDigest.of([corpus.block(number) for number in range(corpus.blocks)])


def test_text_files_are_bytes_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"world!!.")
    (tmp_path / "a.txt").write_bytes(b"hello ")
    corpus = open_corpus(DataSection(kind="bytes", files=(str(tmp_path / "*.txt"),)), 4)
    assert corpus.windows == 3
    rows = corpus.rows([2, 0])
    assert rows.dtype == torch.int64
    assert [bytes(row.tolist()) for row in rows] == [b"rld!!", b"hello"]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_mapped_and_not_read(tmp_path: Path, dtype: str) -> None:
    numbers = np.arange(40_000, 40_101, dtype=dtype)
    numbers.tofile(tmp_path / "tokens.bin")
    corpus = open_corpus(DataSection(kind="tokens", files=(str(tmp_path / "tokens.bin"),), dtype=dtype), 10)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.rows([9])[0].tolist() == list(range(40_090, 40_101))
    text = whole(corpus)
    text.check_vocabulary(40_101)
    with pytest.raises(UsageError, match=r"got the token 40100; the model has a vocabulary of 40100"):
        text.check_vocabulary(40_100)


def test_the_standard_library_is_text() -> None:
    corpus = open_corpus(DataSection(kind="stdlib"), 128)
    assert corpus.windows > 5000
    assert whole(corpus).highest < 256


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(dict):
        column_names = property(lambda self: list(self))

    asked = []

    def load_dataset(*args: object, **kwargs: object) -> Rows:
        asked.append((args, kwargs))
        return Rows(text=["one", "two", "three"])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    section = DataSection(kind="huggingface", name="some/text", subset="small", split="train[:1%]")
    corpus = open_corpus(section, 12)
    assert bytes(corpus.rows([0])[0].tolist()) == b"one\n\ntwo\n\nthr"
    assert asked == [(("some/text", "small"), {"split": "train[:1%]"})]
    with pytest.raises(UsageError, match=r"data.column: got 'body'; the data set has text"):
        open_corpus(DataSection(kind="huggingface", name="x", column="body"), 4)


def test_data_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    monkeypatch.setitem(sys.modules, "datasets", None)
    cases = [
        (DataSection(kind="bytes", files=(str(tmp_path / "*.txt"),)), r"no file matches .*\*\.txt"),
        (DataSection(kind="tokens", files=(str(tmp_path / "odd.bin"),)), r"has 3 bytes; expected uint16 numbers of 2"),
        (DataSection(kind="bytes", files=(str(tmp_path / "odd.bin"),)), r"got 3 tokens; expected more than one"),
        (DataSection(kind="huggingface", name="x"), r"pip install datasets"),
    ]
    for section, says in cases:
        with pytest.raises(UsageError, match=says):
            open_corpus(section, 4)


def test_one_text_is_told_from_another() -> None:
    texts = [np.arange(50) % 7, np.arange(51) % 7, np.arange(50) % 5]
    digests = {whole(Corpus(text.astype(np.uint8), 5)).digest for text in texts}
    assert len(digests) == 3
    assert whole(Corpus(texts[0].astype(np.uint32), 5)).digest in digests  # tokens, not how they are stored


def test_a_global_batch_is_the_same_however_it_is_cut() -> None:
    corpus = Corpus(np.arange(1001, dtype=np.uint32), 10)
    order = ShuffledOrder(corpus.windows, 3)
    whole = Batches(corpus, order, 12, 12).rows(4, 0)
    for micro in (1, 2, 3, 4, 6):
        cut = Batches(corpus, order, 12, micro)
        assert torch.equal(torch.cat([cut.rows(4, n) for n in range(12 // micro)]), whole)
    assert whole.shape == (12, 11) and len(set(whole[:, 0].tolist())) == 12
    assert not torch.equal(Batches(corpus, order, 12, 12).rows(5, 0), whole)
