"""The vocabularies of a store: the bytes of every token id, once for each tokenizer.

They make a store readable as text where the tokenizer of its sessions is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from bridle.store.encoding.vocabulary import pack_vocabulary
from bridle.store.errors import StoreUnavailable
from bridle.store.schema.database import connect, shown, transaction
from bridle.store.schema.tables import vocabularies


def keep_vocabulary(url: str, pieces: Sequence[bytes]) -> str:
    """Store the bytes of every token id unless the store has them; return their digest.

    Several processes may do so at once. Raise :class:`StoreUnavailable`.
    """
    digest, packed = pack_vocabulary(pieces)
    engine = connect(url)
    held = select(vocabularies.c.digest).where(vocabularies.c.digest == digest)
    try:
        with transaction(engine) as connection:
            if connection.execute(held).first() is None:
                connection.execute(insert(vocabularies).values(digest=digest, data=packed))
    except IntegrityError:
        pass  # another process was faster
    except DBAPIError as error:
        raise StoreUnavailable(f"{shown(url)} cannot be written: {error.orig}") from error
    finally:
        engine.dispose()
    return digest
