"""What may be a storage, what is refused and why, and what a server that is away for a while does."""

import optuna
import pytest
import sqlalchemy.exc

from kvlab.search.__main__ import main as search
from kvlab.study.__main__ import main as study
from kvlab.study.recipes import Launch, render
from kvlab.study.storages import Storage, StorageError, has_password, hidden, open_storage, served, server_away
from kvlab.worker import main as worker

REFUSED = {
    "sqlite:///x.db": r"sqlite:///x\.db.*SQLite repeats and loses trials.*journal:FILE.*postgresql://",
    "sqlite+pysqlite:///x.db": "SQLite repeats and loses trials",
    "study.log": r"'study\.log' names no kind of storage.*journal:study\.log",
    "./runs/study.log": r"journal:\./runs/study\.log",
    "mysql://u:geheim@h/d": r"mysql://u@h/d'.*unknown kind 'mysql'.*Known are journal:FILE",
    "redis://h": "unknown kind 'redis'",
    "jurnal:x.log": "nearest is 'journal'",
    "postgresql+psycopg2://u@h/d": "not used through 'psycopg2'.*postgresql://u@h/d",
    "grpc+journal://x.log": r"not used through 'journal'.*named by its own address, grpc://HOST:PORT",
    "grpc://host": "no address of a gRPC proxy.*grpc://HOST:PORT",
    "journal:": "names no file.*journal:FILE",
}


@pytest.mark.parametrize(("url", "said"), REFUSED.items())
def test_what_cannot_be_shared_is_refused_with_the_way_out(url, said) -> None:
    with pytest.raises(StorageError, match=said) as caught:
        open_storage(url)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        lambda url: worker(["--study", "s", "--storage", url]),
        lambda url: study(["status", "s", "--storage", url]),
        lambda url: search(["--budget-gb", "6", "--storage", url]),
        lambda url: worker(["--study", "s", "--storage", url, "--recipe", "shell"]),
    ],
)
def test_sqlite_is_refused_by_every_command_before_anything_is_loaded(command, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("sqlite:///x.db") == 2
    captured = capsys.readouterr()
    assert "SQLite repeats and loses trials" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "x.db").exists()


def test_a_study_without_a_storage_is_refused(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert search(["--budget-gb", "6", "--study", "demo"]) == 2
    assert "--study demo names a study of a --storage" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["journal:x.log", "grpc://h:1"])
def test_a_proxy_stands_before_postgresql_only(url, capsys) -> None:
    with pytest.raises(StorageError, match=r"hands one trial to several workers.*postgresql://"):
        served(url)
    assert study(["serve", "--storage", url]) == 2
    assert "gRPC proxy cannot stand before" in capsys.readouterr().err


def test_a_journal_is_made_where_it_is_named(tmp_path) -> None:
    for text in (f"journal:{tmp_path}/a/x.log", f"journal://{tmp_path}/b/x.log"):
        assert open_storage(text).url.startswith(f"journal:{tmp_path}/")
    assert (tmp_path / "a/x.log").exists()
    assert (tmp_path / "b/x.log").exists()
    with pytest.raises(StorageError, match="names no file"):
        open_storage(f"journal:{tmp_path}/a")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        open_storage(f"journal:{tmp_path}/file/x.log")


def test_passwords_are_not_shown() -> None:
    assert hidden("postgresql://u:geheim@h/d") == "postgresql://u@h/d"
    assert has_password("postgresql://u:geheim@h/d")
    for url in ("postgresql://u@h/d", "postgresql://u@/d?host=/tmp", "journal:a:b@c.log"):
        assert hidden(url) == url
    with pytest.raises(StorageError, match="PGPASSWORD") as caught:
        render("shell", Launch(study="s", storage="postgresql://u:geheim@h/d", workers=1))
    assert "geheim" not in str(caught.value)


class Flaky:
    """Fails so often, then answers."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error = times, error

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return "here"


def gone() -> Exception:
    error = optuna.exceptions.StorageInternalError("commit")
    error.__cause__ = sqlalchemy.exc.OperationalError("select 1", {}, Exception("server closed the connection"))
    return error


def storage(patience_s: float) -> Storage:
    return Storage("postgresql://u@h/d", None, None, server_away, patience_s)  # type: ignore[arg-type]


def test_an_outage_is_waited_out_and_anything_else_is_not() -> None:
    assert storage(60).ask(Flaky(2, gone())) == "here"
    wrong = Flaky(1, optuna.exceptions.StorageInternalError("too long"))
    with pytest.raises(optuna.exceptions.StorageInternalError):
        storage(60).ask(wrong)
    assert wrong.left == 0


def test_an_outage_without_end_says_who_does_not_answer_and_what_to_do() -> None:
    with pytest.raises(StorageError, match=r"postgresql://u@h/d has not answered for 0 s.*server closed.*Start its"):
        storage(0).ask(Flaky(10**6, gone()))


def test_a_restart_between_two_requests_is_not_noticed(postgres, fresh) -> None:
    opened = open_storage(postgres.url)
    optuna.create_study(storage=opened.direct, study_name=fresh("restart"))
    before = len(opened.direct.get_all_studies())
    postgres.stop("immediate")
    postgres.start()
    assert len(opened.ask(opened.direct.get_all_studies)) == before
