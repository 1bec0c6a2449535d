"""Database access through one thread: units of work from the event loop, batched into transactions.

A unit is a function of a SQLAlchemy session. Units that arrive while a transaction is being written share the next one,
so that a hundred small requests cost one commit. If one of them fails, all are rolled back and run again, each in its
own savepoint, so that the others succeed; without failures, no unit pays for a savepoint.
`await store.write(...)` returns when its transaction is committed. From then on it survives a kill of this process and
a power cut: sqlite syncs its log at each commit (`synchronous=FULL`; amortized over a group), PostgreSQL by default
(`synchronous_commit`).

Units run sequentially in the order of the calls; each sees the effects of earlier units, and never partial ones.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, inspect
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import make_transient
from sqlmodel import Session

from skyrl_gym.waits import waiting
from tx.tinker.storage.database import AlreadyServed, Database, extract_reason

T = TypeVar("T")


class StoreError(Exception):
    """Failure of the database rather than the unit: unreachable, disk full, closed.

    Args:
        may_stand: the connection was lost during the commit, so the outcome is unknown. Otherwise nothing was written.
    """

    def __init__(self, message: str, may_stand: bool = False):
        super().__init__(message)
        self.may_stand = may_stand


class Store:
    """sqlite (WAL) or PostgreSQL, by URL. Used from one event loop.

    Args:
        url: `sqlite:///file.db` or `postgresql://user:password@host/name`
        max_waiting: units that may wait for the writer; further callers of `write` wait for room
        group_seconds: no unit joins a transaction that is older; so long one waits for others, at most
        reconnect_seconds: how long a lost database is waited for

    Raises:
        ConfigError: it is no such URL.
    """

    def __init__(
        self, url: str, *, max_waiting: int = 4096, group_seconds: float = 0.005, reconnect_seconds: float = 30.0
    ):
        self._database = Database(url)
        self._place = f"file {self._database.url.database}" if self._database.is_sqlite else str(self._database)
        self._group_seconds = group_seconds
        self._reconnect_seconds = reconnect_seconds
        self._units: queue.SimpleQueue[_Unit | None] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(max_waiting)
        self._writer: threading.Thread | None = None
        self._readers = ThreadPoolExecutor(self._database.num_readers, thread_name_prefix="store-read")
        self._closed = False
        self.database_id = ""
        """Drawn when the database was made; known once started."""

    async def start(self) -> None:
        """Lock the database for this process and create missing tables.

        Raises:
            ConfigError: it cannot be reached or written, another server has it, or another release made it.
        """
        self.database_id = await asyncio.to_thread(self._open)
        self._writer = threading.Thread(target=self._write_groups, name="store-write", daemon=True)
        self._writer.start()

    async def write(self, unit: Callable[[Session], T]) -> T:
        """Run a unit of work in a transaction and return after the commit. The unit runs in another thread and may run
        again (another unit of its transaction failed, the connection was lost), so it must change nothing but the
        session. It may return rows: they keep their values.

        Once queued, the unit is applied completely, even if the caller is cancelled.

        Raises:
            StoreError: the transaction failed, or the store is closed.
            Exception: what the unit raised; it changed nothing.
        """
        self._check_open()
        await self._room.acquire()
        # close() may have run during the await: the writer is then stopping and would never see this unit.
        if self._closed:
            self._room.release()  # for the next waiting caller, which gets the same error
            self._check_open()
        loop = asyncio.get_running_loop()
        work = _Unit(unit, loop, loop.create_future())
        self._units.put(work)
        return await work.done  # the caller may go; its unit does not, and its room is free when the writer is done

    async def read(self, unit: Callable[[Session], T]) -> T:
        """Run a read-only unit of work without waiting for writes. It sees a consistent state that includes all commits
        before the call.

        Raises:
            StoreError: the database cannot be reached, or the store is closed.
            Exception: what the unit raised.
        """
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, unit)

    async def close(self) -> None:
        """Finish the accepted units, refuse waiting and new ones, and release the database."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            self._units.put(None)
            # Not joined on the event loop, where callers of write() still have to receive their results.
            await asyncio.to_thread(self._writer.join)
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._database.close)

    def _check_open(self) -> None:
        if self._writer is None or self._closed:
            raise StoreError("the store is not open; nothing was done")

    def _open(self) -> str:
        try:
            return self._database.open()
        except BaseException:
            self._database.close()
            raise

    def _read(self, unit: Callable[[Session], T]) -> T:
        deadline = time.monotonic() + self._reconnect_seconds
        while True:
            connected = False
            try:
                with Session(self._database.reader, expire_on_commit=False) as session:
                    session.connection()
                    connected = True
                    return unit(session)
            except SQLAlchemyError as error:
                if connected and not _is_connection_lost(error):
                    raise
                if time.monotonic() > deadline:
                    raise StoreError(f"{self._database} cannot be reached: {extract_reason(error)}") from error
                time.sleep(0.1)

    # ---- in the writer's thread

    def _write_groups(self) -> None:
        while (unit := self._units.get()) is not None:
            group = [unit]
            try:
                self._write_group(group)
            except Exception as error:  # whatever it is: everybody waits for this thread
                for unit in group:
                    unit.error = StoreError(str(error), isinstance(error, StoreError) and error.may_stand)
                    unit.error.__cause__ = error
            self._send_results(group)

    def _write_group(self, group: list["_Unit"]) -> None:
        """Run units until none waits or time is up, and commit them. After a lost connection, reconnect and run all of
        them again.

        Args:
            group: the first, to which the others are added

        Raises:
            StoreError: none of them stands, or it cannot be known.
        """
        deadline = time.monotonic() + self._reconnect_seconds
        while True:
            step = "connecting"
            try:
                with waiting("a transaction", on=self._place), self._database.writing() as connection:
                    step = "running"
                    if not self._run_together(connection, group):
                        connection.rollback()
                        for unit in group:
                            unit.run_apart(connection)
                    step = "committing"
                    connection.commit()
                return
            except (SQLAlchemyError, AlreadyServed) as error:
                lost = step == "connecting" or _is_connection_lost(error)
                if lost and step != "committing" and time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                may_stand = lost and step == "committing"
                outcome = "may or may not be applied" if may_stand else "was not applied"
                message = f"{self._database} failed while {step}, and this change {outcome}: {extract_reason(error)}"
                raise StoreError(message, may_stand) from error

    def _run_together(self, connection: Connection, group: list["_Unit"]) -> bool:
        """False if a unit failed; then what all of them did is to be undone."""
        until = time.monotonic() + self._group_seconds
        transaction = connection.begin()
        with _open_session(connection) as session:
            done = 0
            while done < len(group) or self._join(group, until):
                if not group[done].run(session) or not transaction.is_active:
                    return False
                done += 1
        return True

    def _join(self, group: list["_Unit"], until: float) -> bool:
        """Add a waiting unit to the transaction, if there is one and time remains."""
        if time.monotonic() >= until:
            return False
        try:
            unit = self._units.get_nowait()
        except queue.Empty:
            return False
        if unit is None:
            self._units.put(None)  # closing: the last unit
            return False
        group.append(unit)
        return True

    def _send_results(self, group: list["_Unit"]) -> None:
        def deliver() -> None:
            for unit in group:
                self._room.release()
                unit.deliver()

        try:
            group[0].loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed, so no caller waits
            return


class _UnitSession(Session):
    """Session whose transaction is controlled by the store."""

    def add(self, instance: object, *, _warn: bool = True) -> None:
        """Add a row; one that an earlier, rolled-back run of the unit inserted is made new again."""
        if inspect(instance).detached:  # pyright: ignore[reportOptionalMemberAccess]
            make_transient(instance)
        super().add(instance, _warn=_warn)

    def commit(self) -> None:
        raise RuntimeError("a unit of work must not commit: the store commits after it")

    def rollback(self) -> None:
        raise RuntimeError(
            "a unit of work must not roll back: it must raise, or use session.begin_nested() for operations "
            "that may fail"
        )


def _open_session(connection: Connection) -> _UnitSession:
    return _UnitSession(connection, expire_on_commit=False, join_transaction_mode="rollback_only")


@dataclass(eq=False)
class _Unit:
    """Function queued for the writer, with its waiting caller."""

    function: Callable[[Session], object]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    value: object = None
    error: BaseException | None = None

    def run(self, session: Session) -> bool:
        """Run the unit. Returns: False if it failed; the session is reset for the next unit.

        Raises:
            SQLAlchemyError: the transaction is lost, with all its units.
        """
        self.value, self.error = None, None
        try:
            self.value = self.function(session)
            session.flush()
            session.expunge_all()
        except BaseException as error:  # delivered to the caller of the unit
            self.error = error
            if _is_connection_lost(error):
                raise
        return self.error is None

    def run_apart(self, connection: Connection) -> None:
        """Run the unit in its own savepoint, which alone is undone if it fails. Raises: see `run`."""
        savepoint = connection.begin_nested()
        with _open_session(connection) as session:
            went_well = self.run(session)
        if went_well and savepoint.is_active:
            savepoint.commit()
            return
        if went_well:
            self.error = RuntimeError(
                "a unit of work continued after an error had rolled back its changes; it must use begin_nested there"
            )
        if savepoint.is_active:
            savepoint.rollback()

    def deliver(self) -> None:
        if self.done.done():  # cancelled
            return
        if self.error is None:
            self.done.set_result(self.value)
        elif isinstance(self.error, StopIteration):  # which a future cannot hold
            self.done.set_exception(RuntimeError(f"a unit of work raised {self.error!r}"))
        else:
            self.done.set_exception(self.error)


def _is_connection_lost(error: BaseException) -> bool:
    return isinstance(error, DBAPIError) and error.connection_invalidated
