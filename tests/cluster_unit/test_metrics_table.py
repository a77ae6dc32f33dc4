"""cluster/METRICS.md names all that is exported, and nothing else."""

import re
from pathlib import Path

from tests.exported_metrics import Described, by_vllms_names, of_each_role

TABLES = (Path(__file__).parents[2] / "cluster" / "METRICS.md").read_text()
ALL = "all"


def documented(prefix: str) -> dict[Described, list[str]]:
    """Its rows, and what is in their further cells."""
    rows: dict[Described, list[str]] = {}
    for line in TABLES.splitlines():
        if not line.startswith(f"| `{prefix}"):
            continue
        name, kind, labels, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        described = Described(name.strip("`"), kind, frozenset(re.findall(r"`(\w+)`", labels)))
        assert described not in rows, f"{name} is there twice"
        assert len(rest) in (2, 3) and all(rest), f"{name}: a cell is empty"
        rows[described] = rest
    return rows


def test_each_metric_has_its_row_and_each_row_its_metric() -> None:
    told_by: dict[Described, list[str]] = {}
    for role, families in of_each_role().items():
        names = [family.name for family in families]
        assert len(set(names)) == len(names), f"the {role} tells one of them twice"
        for family in families:
            told_by.setdefault(Described.of(family), []).append(role)
    rows = documented("shoal_")
    assert set(rows) == set(told_by)
    said = {described: told for described, (_, told, _) in rows.items()}
    everybody = len(of_each_role())
    assert said == {d: ALL if len(roles) == everybody else ", ".join(roles) for d, roles in told_by.items()}


def test_vllms_names_have_theirs() -> None:
    assert set(documented("vllm:")) == {Described.of(family) for family in by_vllms_names()}


def test_every_metric_says_what_it_is() -> None:
    for families in (*of_each_role().values(), by_vllms_names()):
        for family in families:
            assert family.documentation.endswith((".", "...")), family.name


def test_labels_have_few_values() -> None:
    """None but those of HTTP's routes and statuses is open, and these are ours."""
    for families in of_each_role().values():
        for family in families:
            assert len(family.samples) <= 40, family.name
