"""How to start many workers: a shell script, a Slurm array, a Kubernetes Job. Text only; nothing is started here."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.study.storages import StorageError, has_password, hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`workers` of one study, each with so much memory and, if asked for, a GPU of its own."""

    study: str
    storage: str
    workers: int
    gpu: bool = False
    memory_gb: int = 8
    minutes: int = 240
    image: str = ""
    model: str = ""

    def arguments(self) -> list[str]:
        words = ["-m", "kvlab.worker", "--study", self.study, "--storage", self.storage]
        return [*words, *(["--model", self.model] if self.model else [])]

    def name(self) -> str:
        """A name that launchers take: lower case letters, digits and dashes, 63 at most."""
        return re.sub(r"[^a-z0-9]+", "-", f"kvlab-{self.study}".lower())[:63].strip("-")


def render(kind: str, launch: Launch) -> str:
    """The text of a recipe. Raises StorageError for a storage these workers could not share, or with a password."""
    if has_password(launch.storage):
        raise StorageError(
            f"--storage {hidden(launch.storage)} carries a password, which a recipe would show to everybody who reads "
            "it. Leave it out: the server's client reads PGPASSWORD, or ~/.pgpass"
        )
    if launch.storage.startswith("sqlite"):
        raise StorageError(
            f"--storage {launch.storage}: SQLite repeats and loses trials when several processes share it. Use "
            "journal:FILE on one machine, or postgresql://USER@HOST/DATABASE across machines"
        )
    return RECIPES[kind](launch)


def _words(launch: Launch) -> str:
    return shlex.join(launch.arguments())


def _shell(launch: Launch) -> str:
    gpu = 'CUDA_VISIBLE_DEVICES="$n" ' if launch.gpu else ""
    return f"""\
#!/usr/bin/env bash
# {launch.workers} workers on this machine. Stopped, it stops them, and each gives back what it was working on.
set -euo pipefail
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(( ($(nproc) + {launch.workers - 1}) / {launch.workers} ))}}"
workers=()
trap 'kill -TERM "${{workers[@]}}" 2>/dev/null || true' INT TERM
for (( n = 0; n < {launch.workers}; n++ )); do
  {gpu}"${{PYTHON:-python3}}" {_words(launch)} </dev/null &
  workers+=("$!")
done
status=0
for worker in "${{workers[@]}}"; do
  wait "$worker" || status=$?
done
exit "$status"
"""


def _slurm(launch: Launch) -> str:
    gpu = "#SBATCH --gres=gpu:1\n" if launch.gpu else ""
    shared = "# The journal must lie on a file system that all nodes share.\n" if _is_journal(launch) else ""
    return f"""\
#!/usr/bin/env bash
#SBATCH --job-name={launch.name()}
#SBATCH --array=0-{launch.workers - 1}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem={launch.memory_gb}G
#SBATCH --time={launch.minutes}
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output={launch.name()}-%A_%a.log
{gpu}{shared}# Two minutes before its time is up a worker gives back what it was working on.
set -euo pipefail
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-4}}"
exec "${{PYTHON:-python3}}" {_words(launch)} </dev/null
"""


def _k8s(launch: Launch) -> str:
    if _is_journal(launch):
        raise StorageError(
            f"--storage {launch.storage}: pods share no file. Use postgresql://USER@HOST/DATABASE for a Kubernetes Job"
        )
    if not launch.image:
        raise StorageError("--image is needed for a Kubernetes Job: a container image in which kvlab is installed")
    gpu = "\n              nvidia.com/gpu: 1" if launch.gpu else ""
    arguments = "\n".join(f"            - {json.dumps(word)}" for word in launch.arguments())
    return f"""\
# The password, if the server asks for one: kubectl create secret generic kvlab-postgres --from-literal=password=...
apiVersion: batch/v1
kind: Job
metadata:
  name: {launch.name()}
spec:
  parallelism: {launch.workers}
  completions: {launch.workers}
  completionMode: Indexed
  backoffLimit: {3 * launch.workers}
  activeDeadlineSeconds: {60 * launch.minutes}
  ttlSecondsAfterFinished: 86400
  podFailurePolicy:
    rules:
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 120
      containers:
        - name: worker
          image: {json.dumps(launch.image)}
          command:
            - "python3"
          args:
{arguments}
          env:
            - name: OMP_NUM_THREADS
              value: "4"
            - name: PGPASSWORD
              valueFrom:
                secretKeyRef:
                  name: kvlab-postgres
                  key: password
                  optional: true
          resources:
            requests:
              cpu: "4"
              memory: {launch.memory_gb}Gi
            limits:
              memory: {launch.memory_gb}Gi{gpu}
"""


def _is_journal(launch: Launch) -> bool:
    return launch.storage.startswith("journal:")


RECIPES: dict[str, Callable[[Launch], str]] = {"shell": _shell, "slurm": _slurm, "k8s": _k8s}
