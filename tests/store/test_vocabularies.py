"""The texts of tokens in the store: once for each tokenizer, from several processes at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from bridle.store.errors import NotFound, StoreUnavailable
from bridle.store.reading.queries import Reader
from bridle.store.schema.database import connect, migrate, transaction
from bridle.store.schema.tables import vocabularies
from bridle.store.writing.vocabularies import keep_vocabulary

PIECES = [b"", b"<|im_end|>", "wört".encode(), b"\xf0\x9f", *(bytes([n]) for n in range(256))]


def test_a_vocabulary_is_kept_once_and_read_back(url: str) -> None:
    migrate(url)
    with ThreadPoolExecutor(4) as pool:
        digests = set(pool.map(lambda _: keep_vocabulary(url, PIECES), range(8)))
    other = keep_vocabulary(url, PIECES[1:])
    (digest,) = digests
    with Reader(url) as reader:
        assert reader.vocabulary(digest) == PIECES
        assert reader.vocabulary(other) == PIECES[1:]
        with reader.engine.connect() as connection:
            counted = connection.execute(select(func.count()).select_from(vocabularies))
            assert counted.scalar_one() == 2
        with pytest.raises(NotFound, match="no vocabulary of-no-use"):
            reader.vocabulary("of-no-use")


def test_a_damaged_vocabulary_is_an_error_in_one_line(url: str) -> None:
    migrate(url)
    digest = keep_vocabulary(url, PIECES)
    engine = connect(url)
    with transaction(engine) as connection:
        connection.execute(update(vocabularies).values(data=b"\x00\xc1"))
    engine.dispose()
    with Reader(url) as reader, pytest.raises(ValueError, match="a vocabulary is damaged"):
        reader.vocabulary(digest)


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"gone\.db"):
        keep_vocabulary(str(tmp_path / "gone.db"), PIECES)
