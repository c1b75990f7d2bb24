"""Storages for studies: a journal file, and a PostgreSQL server of the tests' own."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlab.bench.postgres import NoServerError, Server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server on a unix socket; skips where PostgreSQL is not installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'kvlab[postgres]'")
    try:
        server = Server(durable=False)
    except NoServerError as error:
        pytest.skip(f"no PostgreSQL: {error}")
    with server:
        yield server


@pytest.fixture(params=["journal", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").url
    return f"journal:{tmp_path}/study.log"


@pytest.fixture
def fresh() -> Callable[[str], str]:
    """A name that no other test uses: the server is shared."""
    return lambda name: f"{name}-{uuid.uuid4().hex[:8]}"
