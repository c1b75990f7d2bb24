"""What the rows of a run stand for: its configs and its items by id, so that every row can be scored again.

Configs lie in `configs.json` (schema kvlab.configs/1), written before their first row is. Items are made anew from what
the run was asked, and held against the hash that it noted.
"""

import difflib
from collections.abc import Iterable, Mapping

from kvlab.config import KVConfig
from kvlab.evals.draft import estimate_tokens
from kvlab.evals.item import Item
from kvlab.evals.ruler.fit import Count
from kvlab.evals.sets import choose
from kvlab.runs import Run

SCHEMA = "kvlab.configs/1"
_FILE = "configs.json"


def record(run: Run, configs: Mapping[str, KVConfig]) -> None:
    """Write all configs of a run, by id."""
    told = {key: {"label": config.label, "config": config.to_dict()} for key, config in configs.items()}
    run.write_json(_FILE, {"schema": SCHEMA, "configs": told})


def recorded(run: Run) -> dict[str, KVConfig]:
    """Every config of a run that has got as far as scoring one, by id; empty where none is on record.

    Raises ValueError for a config that does not have the id it is filed under.
    """
    if not (run.path / _FILE).exists():
        return {}
    found = {key: KVConfig.from_dict(told["config"]) for key, told in run.read_json(_FILE)["configs"].items()}
    for key, config in found.items():
        if config.id != key:
            raise ValueError(f"config {key} in {run.path / _FILE} has the id {config.id}: it was edited after the run")
    return found


def named(run: Run, name: str) -> KVConfig:
    """The config of a run with this id, beginning of an id (4 digits at least) or label.

    Raises ValueError naming the nearest where there is none, or all where there are several.
    """
    configs = recorded(run)
    found = [c for c in configs.values() if name in (c.id, c.label) or (len(name) >= 4 and c.id.startswith(name))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{name!r} is {len(found)} configs of {run.path.name}: {', '.join(c.id for c in found)}")
    known = [word for config in configs.values() for word in (config.label, config.id)]
    near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
    hint = f"nearest is {near[0]!r}" if near else "it has no config on record"
    raise ValueError(f"{run.path.name} scored no config {name!r}; {hint}")


def items_of(run: Run, splits: Iterable[str], count: Count = estimate_tokens) -> dict[str, Item]:
    """Items of these splits, by id. `count` is for tasks of a fixed length in tokens.

    Raises ValueError where they are not those of the run: another version, or a set that changed.
    """
    request, noted = run.config["request"], run.read_json("provenance.json")["evalset"]
    sizes = run.config.get("sizes") or {"confirm_items": request["items"]}
    asked, found = choose(request["sets"]), {}
    for split in splits:
        n = sizes["search_items" if split == "search" else "confirm_items"]
        most = asked.most(request["families"], split)
        made = asked.build(
            request["families"],
            split=split,
            n=n if most is None or split == "confirm" else min(n, most),
            seed=request["seed"],
            query_aware=bool(request.get("query_aware")),
            count=count,
        )
        if noted.get(split, made.sha256) != made.sha256:
            raise ValueError(
                f"the {split} items of {run.path.name} are not those that its request gives now (another version, or a "
                "set that changed)"
            )
        found |= {item.id: item for item in made.items}
    return found
