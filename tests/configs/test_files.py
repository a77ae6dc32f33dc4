"""Every file of configs/ is what it says: configurations are taken, Dockerfile and script are sound."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shoal.cluster.config import ConfigError, load_config
from shoal.cluster.config.not_yet import NOT_YET
from shoal.cluster.config.problems import parsed
from shoal.cluster.config.schema import schema_text

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
OURS = {
    "laptop.yaml": [],
    "several-nodes.yaml": [],
    "one-gpu-node.yaml": ["models[0].accelerator_type"],
    "kuberay/serve.yaml": [],
}
"""What of each this version cannot do, as long as it cannot: that is refused, and nothing else of it."""

RAY_JOB = CONFIGS / "ray-job.yaml"


def refused_now(fields: list[str]) -> list[str]:
    patterns = [parsed(entry.field) for entry in NOT_YET]
    return [
        field
        for field in fields
        if tuple("*" if isinstance(p, int) else p for p in parsed(field)) in patterns
    ]


@pytest.mark.parametrize("name", OURS)
def test_each_is_taken_but_for_what_this_version_cannot_do(name: str) -> None:
    refused = refused_now(OURS[name])
    if not refused:
        load_config(CONFIGS / name)
        return
    with pytest.raises(ConfigError) as raised:
        load_config(CONFIGS / name)
    assert [problem.field for problem in raised.value.problems] == refused
    assert all(problem.is_not_yet for problem in raised.value.problems)


@pytest.mark.parametrize("name", OURS)
def test_editors_agree(name: str) -> None:
    """The first line names the schema, and the schema accepts the file."""
    text = (CONFIGS / name).read_text()
    schema = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert ((CONFIGS / name).parent / schema).resolve() == CONFIGS / "schema.json"
    jsonschema.validate(yaml.safe_load(text), yaml.safe_load(schema_text()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"nme": "a"},
        {"http": {"port": "80"}},
        {"kv_store": {"memory": "lots"}},
        {"stop_grace": "soon"},
        {"models": []},
    ],
)
def test_editors_see_what_is_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, yaml.safe_load(schema_text()))


def test_the_schema_is_current() -> None:
    assert (CONFIGS / "schema.json").read_text() == schema_text(), "shoal config schema > configs/schema.json"


def test_no_yaml_is_left_unlooked_at() -> None:
    files = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")}
    manifests = {name for name in files if name.startswith("kuberay/")} - set(OURS)
    assert files == {*OURS, *manifests, RAY_JOB.name}, "test_kuberay.py looks at the manifests"


@pytest.mark.parametrize("name", ["several-nodes.yaml", "kuberay/serve.yaml"])
def test_a_job_is_not_killed_while_its_streams_end(name: str) -> None:
    """Within what `ray job stop` waits, streams end and then actors: see cluster/serve.py."""
    waits = int(yaml.safe_load(RAY_JOB.read_text())["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    grace = yaml.safe_load((CONFIGS / name).read_text())["stop_grace"]
    assert waits >= 2 * int(grace.removesuffix("s"))


def lint(tool: str, *arguments: str | Path) -> None:
    command = [str(Path(sys.executable).with_name(tool)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_is_sound() -> None:
    lint("hadolint", "--no-color", CONFIGS / "Dockerfile")


def test_the_script_is_sound() -> None:
    lint("shellcheck", CONFIGS / "kuberay" / "smoke.sh")


def test_an_image_is_built_from_the_product_alone() -> None:
    """What pyproject.toml reads is let in and nothing else, so that no secret of a clone gets there."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    rooms = {path.name for path in (ROOT / ".src" / "shoal").iterdir() if path.is_symlink()}
    assert let_in == {".src", "LICENSE", "README.md", "pyproject.toml", *rooms}
    assert lines[1] == "*"
    assert lines[-2:] == ["**/__pycache__", "**/*.so"]
