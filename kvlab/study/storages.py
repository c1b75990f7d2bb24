"""Where studies live, by URL: a journal file on one machine, PostgreSQL across machines, or a gRPC proxy before it.

Everything a study asks of a storage is what every Optuna storage has: unique trial numbers, one winner of a waiting
trial, one end of a trial. What cannot give that to several processes is refused here, with the way out.
"""

import difflib
import importlib.util
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy.exc
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalStorage

from kvlab.study.journal import JournalFile

T = TypeVar("T")
KINDS = ("journal", "postgresql", "grpc")
PATIENCE_S = 120.0
_PROXY_THREADS = 10  # of Optuna's server


class StorageError(ValueError):
    """A storage that cannot be used as asked; the message names the URL, the rule and the fix."""


@dataclass(frozen=True, slots=True)
class Storage:
    """An open storage. `direct` asks anew each time, `cached` remembers trials that have ended."""

    url: str  # without its password
    direct: BaseStorage
    cached: BaseStorage
    outages: Callable[[BaseException | None], bool] = lambda error: False
    patience_s: float = PATIENCE_S

    def ask(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        """Call a method of the storage; while its server is away, wait for up to `patience_s` and ask again."""
        until, pause = time.monotonic() + self.patience_s, 0.1
        while True:
            try:
                return call(*args, **named)
            except Exception as error:
                if not self.away(error):
                    raise
                if time.monotonic() > until:
                    raise StorageError(
                        f"{self.url} has not answered for {self.patience_s:g} s ({_reason(error)}). Start its server "
                        "again; work that was under way is taken up by whoever comes next"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def away(self, error: Exception) -> bool:
        """Whether an error says that the server cannot be reached, rather than that the request is wrong."""
        return self.outages(error) or self.outages(error.__cause__)


def open_storage(url: str, *, patience_s: float = PATIENCE_S) -> Storage:
    """Open a storage by URL. Raises StorageError for what several processes cannot share, or what is not installed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scheme, rest = _split(url)
    if scheme == "journal":
        return _journal(url, rest, patience_s)
    return _postgresql(rest, patience_s) if scheme == "postgresql" else _grpc(url, rest, patience_s)


def served(url: str) -> Storage:
    """A storage for a gRPC proxy to stand before. Raises StorageError for anything but PostgreSQL."""
    scheme, _ = _split(url)
    if scheme != "postgresql":
        raise StorageError(
            f"a gRPC proxy cannot stand before {hidden(url)}: over a {scheme} storage it hands one trial to several "
            "workers. Serve postgresql://USER@HOST/DATABASE, or let the workers use this storage directly"
        )
    return _postgresql(url.partition(":")[2], PATIENCE_S, connections=_PROXY_THREADS)


def hidden(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"(?<=://)([^/@:\s]*):[^/@\s]*@", r"\1@", url)


def has_password(url: str) -> bool:
    return hidden(url) != url


def _split(url: str) -> tuple[str, str]:
    """Kind and the rest of a URL."""
    scheme, colon, rest = url.partition(":")
    if not colon or "/" in scheme:
        raise StorageError(f"--storage {url!r} names no kind of storage: a file on this machine is journal:{url}")
    kind, _, driver = scheme.lower().partition("+")
    kind = {"postgres": "postgresql"}.get(kind, kind)
    if kind == "sqlite":
        raise StorageError(
            f"--storage {url!r}: SQLite repeats and loses trials when several processes share it. Use "
            "journal:FILE on one machine, or postgresql://USER@HOST/DATABASE across machines"
        )
    if kind not in KINDS:
        near = (difflib.get_close_matches(kind, KINDS, 1) or ["journal"])[0]
        raise StorageError(
            f"--storage {hidden(url)!r}: unknown kind {kind!r}, nearest is {near!r}. Known are journal:FILE, "
            "postgresql://USER@HOST/DATABASE and grpc://HOST:PORT"
        )
    if driver and (kind, driver) != ("postgresql", "psycopg"):
        raise StorageError(
            f"--storage {hidden(url)!r}: {kind} is not used through {driver!r}. Write {kind}:{hidden(rest)}"
            + (" (a gRPC proxy is named by its own address, grpc://HOST:PORT)" if kind == "grpc" else "")
        )
    return kind, rest


def _journal(url: str, rest: str, patience_s: float) -> Storage:
    path = Path(rest.removeprefix("//"))
    if not path.name or path.is_dir():
        raise StorageError(f"--storage {url!r} names no file. Write journal:FILE, such as journal:runs/study.log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFile(path))
    except OSError as error:
        raise StorageError(f"--storage {url!r} cannot be written: {error.strerror}. Choose another file") from None
    return Storage(f"journal:{path}", storage, storage, patience_s=patience_s)


def _postgresql(rest: str, patience_s: float, connections: int = 1) -> Storage:
    # A worker has one connection. A second one, closed again at once, while Optuna looks at its tables for the
    # first time and where a lease is renewed in the middle of other work. A connection that a restart of the server
    # broke shows itself in the next request, which is then asked again: no need to try it before each one.
    options = {"pool_size": connections, "max_overflow": 1}

    def connect() -> RDBStorage:
        return RDBStorage(f"postgresql+psycopg:{rest}", engine_kwargs=options)

    shown = hidden(f"postgresql:{rest}")
    opening = Storage(shown, None, None, _while_opening, patience_s)  # type: ignore[arg-type]
    try:
        direct = opening.ask(connect)
    except ImportError:
        raise StorageError(f"--storage {shown}: psycopg is missing: pip install 'kvlab[postgres]'") from None
    except sqlalchemy.exc.ArgumentError as error:
        raise StorageError(f"--storage {shown} is no address ({error}): postgresql://USER@HOST/DATABASE") from None
    return Storage(shown, direct, get_storage(direct), server_away, patience_s)


def _grpc(url: str, rest: str, patience_s: float) -> Storage:
    match = re.fullmatch(r"//([^:/@]+):(\d+)/?", rest)
    if match is None:
        raise StorageError(f"--storage {url!r} is no address of a gRPC proxy. Write grpc://HOST:PORT")
    if importlib.util.find_spec("grpc") is None:
        raise StorageError(f"--storage {url}: grpcio is missing: pip install 'kvlab[grpc]'")
    proxy = optuna.storages.GrpcStorageProxy(host=match[1], port=int(match[2]))
    return Storage(url, proxy, proxy, _unavailable, patience_s)


def server_away(error: BaseException | None) -> bool:
    """Whether a database's server was not there, or went away."""
    return isinstance(error, (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError))


def _while_opening(error: BaseException | None) -> bool:
    # Sixteen processes that make the same tables at once: one does, the others are told that they exist.
    return server_away(error) or isinstance(error, (sqlalchemy.exc.ProgrammingError, sqlalchemy.exc.IntegrityError))


def _unavailable(error: BaseException | None) -> bool:
    import grpc

    return isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAVAILABLE


def _reason(error: Exception) -> str:
    """The line that says most: an error of the server, below what SQLAlchemy and Optuna put around it."""
    inner = error.__cause__ or error
    return str(getattr(inner, "orig", inner)).strip().splitlines()[0][:200]
