"""Rows without the object-relational mapper, for what happens at every request: ten times less work (0.04 ms instead of
0.4 ms an insert), and the thread that does it shares the interpreter with the event loop."""

from sqlalchemy import Table, insert, select, update
from sqlmodel import Session, col

from tx.tinker.storage.db_models import ModelRow, RequestRow, Row


def get_table(row_type: type[Row]) -> Table:
    """Return the table of a row class."""
    return Row.metadata.tables[str(row_type.__tablename__)]


def add_row(session: Session, row_type: type[Row], **values: object) -> None:
    """Insert a row, with defaults for missing columns. Raises sqlalchemy's IntegrityError if the key is taken."""
    session.connection().execute(insert(get_table(row_type)), values)


def remove_commands(database: Session, model_id: str, up_to_seq: int | None = None) -> list[str]:
    """Forget the commands that no restore of a model needs any more. Returns: blobs to delete after the commit."""
    rows = col(RequestRow.model_id) == model_id
    if up_to_seq is not None:
        rows &= col(RequestRow.seq) <= up_to_seq
    blobs = database.scalars(select(col(RequestRow.payload)).where(rows, col(RequestRow.payload).is_not(None))).all()
    database.execute(
        update(RequestRow).where(rows, col(RequestRow.status) != "pending").values(order=None, payload=None)
    )
    return [blob for blob in blobs if blob is not None]


def update_model(database: Session, model_id: str, **values: object) -> None:
    """Set columns of a model's row."""
    database.execute(update(ModelRow).where(col(ModelRow.model_id) == model_id).values(**values))
