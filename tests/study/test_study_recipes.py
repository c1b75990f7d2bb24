"""Recipes: scripts that a shell takes, a job that Kubernetes takes, and words that arrive as they were given."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvlab.study.recipes import RECIPES, Launch, render
from kvlab.study.storages import StorageError
from kvlab.worker import main, parser

HARD = 'demo it\'s $HOME; `x` "q"-0123456789ab'
PG = "postgresql://kvlab@db.example/kvlab?application_name=a b"
# The fields of batch/v1 Job that a recipe may use, and nothing else.
CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image", "command", "args", "resources"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "image": {"type": "string", "minLength": 1},
        "command": {"type": "array", "items": {"type": "string"}},
        "args": {"type": "array", "items": {"type": "string"}},
        "env": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "value": {"type": "string"},
                    "valueFrom": {"type": "object", "properties": {"secretKeyRef": {"required": ["name", "key"]}}},
                },
            },
        },
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"requests": {"type": "object"}, "limits": {"type": "object"}},
        },
    },
}
JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "batch/v1"},
        "kind": {"const": "Job"},
        "metadata": {
            "required": ["name"],
            "properties": {"name": {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}},
        },
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["template"],
            "properties": {
                "parallelism": {"type": "integer", "minimum": 1},
                "completions": {"type": "integer", "minimum": 1},
                "completionMode": {"enum": ["Indexed", "NonIndexed"]},
                "backoffLimit": {"type": "integer", "minimum": 0},
                "activeDeadlineSeconds": {"type": "integer", "minimum": 1},
                "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
                "podFailurePolicy": {
                    "required": ["rules"],
                    "properties": {
                        "rules": {
                            "items": {
                                "required": ["action"],
                                "properties": {"action": {"enum": ["Ignore", "FailJob", "Count", "FailIndex"]}},
                            }
                        }
                    },
                },
                "template": {
                    "type": "object",
                    "required": ["spec"],
                    "additionalProperties": False,
                    "properties": {
                        "spec": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["restartPolicy", "containers"],
                            "properties": {
                                # A job's pods may not be restarted always, and failure policies ask for Never.
                                "restartPolicy": {"const": "Never"},
                                "terminationGracePeriodSeconds": {"type": "integer"},
                                "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
                            },
                        }
                    },
                },
            },
        },
    },
}


def launch(**changes) -> Launch:
    given = {"study": HARD, "storage": PG, "workers": 64, "image": "registry.example/kvlab:0.1", **changes}
    return Launch(**given)


def told(words: list[str]) -> tuple[str, str]:
    """What the worker's own parser makes of the words."""
    assert words[:2] == ["-m", "kvlab.worker"]
    args = parser().parse_args(words[2:])
    return args.study, args.storage


@pytest.mark.parametrize("kind", ["shell", "slurm"])
@pytest.mark.parametrize("gpu", [False, True])
def test_scripts_are_valid_bash(kind, gpu, tmp_path) -> None:
    text = render(kind, launch(gpu=gpu))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-s", "bash", "-"], input=text, text=True, check=True)
    assert "set -euo pipefail" in text


def fake_python(folder: Path) -> Path:
    """Notes its words and its GPU instead of working."""
    path = folder / "python"
    path.write_text(
        "#!/usr/bin/env bash\n"
        f"""printf '%s\\0' "$@" "gpu=${{CUDA_VISIBLE_DEVICES-none}}" > "{folder}/said.$BASHPID"\n"""
        """[[ "${CUDA_VISIBLE_DEVICES-}" != 2 ]] || exit 7\n"""
    )
    path.chmod(0o755)
    return path


def run(text: str, folder: Path) -> tuple[int, list[list[str]]]:
    done = subprocess.run(
        ["bash", "-c", text], env={"PATH": "/usr/bin:/bin", "PYTHON": str(fake_python(folder))}, check=False
    )
    return done.returncode, [f.read_text().split("\0")[:-1] for f in sorted(folder.glob("said.*"))]


def test_the_shell_recipe_starts_so_many_with_the_words_it_was_given(tmp_path) -> None:
    code, said = run(render("shell", launch(workers=3)), tmp_path)
    assert code == 0
    assert len(said) == 3
    assert {told(words[:-1]) for words in said} == {(HARD, PG)}


def test_the_shell_recipe_gives_each_a_gpu_and_says_when_one_fails(tmp_path) -> None:
    code, said = run(render("shell", launch(workers=3, gpu=True)), tmp_path)
    assert sorted(words[-1] for words in said) == ["gpu=0", "gpu=1", "gpu=2"]
    assert code == 7


def test_the_slurm_recipe_is_an_array_that_is_told_before_its_time_is_up(tmp_path) -> None:
    text = render("slurm", launch(gpu=True, minutes=90, memory_gb=24))
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.M))
    assert options["array"] == "0-63"
    assert options["time"] == "90"
    assert options["mem"] == "24G"
    assert options["gres"] == "gpu:1"
    assert options["signal"] == "B:TERM@120"  # the batch shell has become the worker
    assert "requeue" in options
    assert text.startswith("#!/usr/bin/env bash\n#SBATCH")
    code, said = run(text, tmp_path)
    assert code == 0
    assert told(said[0][:-1]) == (HARD, PG)
    assert "file system that all nodes share" in render("slurm", launch(storage="journal:/home/a/study.log"))


@pytest.mark.parametrize("gpu", [False, True])
def test_the_kubernetes_recipe_is_a_job(gpu) -> None:
    job = yaml.safe_load(render("k8s", launch(gpu=gpu, memory_gb=24, minutes=90)))
    jsonschema.validate(job, JOB)
    spec = job["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (64, 64, "Indexed")
    assert spec["activeDeadlineSeconds"] == 5400
    (container,) = spec["template"]["spec"]["containers"]
    assert told(container["args"]) == (HARD, PG)
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (1 if gpu else None)
    assert container["resources"]["limits"]["memory"] == "24Gi"
    (secret,) = [e for e in container["env"] if e["name"] == "PGPASSWORD"]
    assert secret["valueFrom"]["secretKeyRef"]["optional"] is True


def test_the_schema_would_notice() -> None:
    job = yaml.safe_load(render("k8s", launch()))
    job["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, JOB)
    job = yaml.safe_load(render("k8s", launch()))
    job["spec"]["paralellism"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, JOB)


def test_what_a_launcher_cannot_do_is_refused() -> None:
    with pytest.raises(StorageError, match=r"pods share no file.*postgresql://"):
        render("k8s", launch(storage="journal:x.log"))
    with pytest.raises(StorageError, match="--image is needed"):
        render("k8s", launch(image=""))


@pytest.mark.parametrize("kind", RECIPES)
def test_the_command_prints_them_and_touches_no_storage(kind, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--study", "s", "--storage", PG, "--recipe", kind, "--workers", "5", "--image", "i", "--model", "/m x"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text == render(kind, Launch(study="s", storage=PG, workers=5, image="i", model="/m x"))
    assert "/m x" in text
    assert list(tmp_path.iterdir()) == []


def test_a_name_fits_every_launcher() -> None:
    name = launch().name()
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", launch(study="x" * 61 + "-y").name())
    assert json.dumps(name)
