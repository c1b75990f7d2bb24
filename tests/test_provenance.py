import json
import subprocess
import sys

import pytest

from kvlab import provenance as module
from kvlab.provenance import CALLER_KNOWS, provenance, redacted, redacted_argv


def test_every_field_is_there_even_when_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")  # neither git nor nvidia-smi
    record = provenance({"seeds": {"data": 3}})
    assert record["git"] is None
    assert record["gpus"] is None
    assert record["seeds"] == {"data": 3}
    assert all(record[name] is None for name in CALLER_KNOWS if name != "seeds")
    assert record["cores"] >= 1
    assert record["ram_bytes"] > 2**28
    assert len(record["packages_sha256"]) == 64
    json.dumps(record, allow_nan=False)


def repository(folder):
    def run(*words):
        return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True).stdout

    run("init", "-q")
    run("config", "user.email", "t@example.org")
    run("config", "user.name", "t")
    return run


def test_git_is_that_of_the_package_and_not_of_the_folder_around_it(tmp_path):
    run = repository(tmp_path)
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    run("commit", "-q", "--allow-empty", "-m", "empty")
    assert module._git(package) is None  # lies in a checkout, but is not part of it
    run("add", ".")
    run("commit", "-q", "-m", "pkg")
    sha = run("rev-parse", "HEAD").strip()
    assert module._git(package) == {"sha": sha, "dirty": False, "diff_sha256": None}
    (package / "__init__.py").write_text("x = 1")
    changed = module._git(package)
    assert (changed["sha"], changed["dirty"], len(changed["diff_sha256"])) == (sha, True, 64)


@pytest.mark.parametrize(
    "key", ["api_key", "OPENAI_API_KEY", "apiKey", "hf_token", "token", "client-secret", "password"]
)
def test_secret_keys_are_masked(key):
    assert redacted({"deep": [{key: "hush"}]}) == {"deep": [{key: "[redacted]"}]}
    assert redacted({key: ""}) == {key: ""}


@pytest.mark.parametrize(
    "item",
    [("max_new_tokens", 16), ("bytes_per_token", 40), ("sink_tokens", "4"), ("tokenizer", "bpe"), ("eos_token", "</s>"),
     ("axis", "token"), ("secretary", "Ann")],
)  # fmt: skip
def test_ordinary_keys_are_kept(item):
    assert redacted(dict([item])) == dict([item])


def test_command_lines_are_masked():
    words = ["search", "--api-key", "hush", "--hf-token=hush", "--tokens", "5", "--storage", "postgresql://u:hush@h/d"]
    clean = redacted_argv(words)
    assert "hush" not in " ".join(clean)
    assert clean == [
        "search", "--api-key", "[redacted]", "--hf-token=[redacted]", "--tokens", "5", "--storage",
        "postgresql://[redacted]@h/d",
    ]  # fmt: skip
    assert redacted_argv(["--api-key", "--json"]) == ["--api-key", "--json"]


def test_no_heavy_import():
    code = "import sys, kvlab.runs; assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
