"""YAML and flags say the same: every flag of `shoal serve` has its field, and the reverse."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel
from typer.testing import CliRunner

from shoal.actors.ingress.keys import hash_of
from shoal.cluster import serve as serving
from shoal.cluster.cli import app
from shoal.cluster.config import ClusterConfig, load_config
from shoal.cluster.config.flags import FIELD_OF
from shoal.cluster.config.problems import _section as section_of
from shoal.cluster.config.problems import parsed
from shoal.cluster.options import ServeOptions

HAVE_NO_FLAG = {
    "http.on_nodes",
    "http.admin_key_hash",
    "models[0].accelerator_type",
    "models[0].node_labels",
}
"""What a command line is too short for, or what this version cannot do."""

SWITCHES = {"require_kernels", "detached"}


def flags() -> dict[str, Any]:
    """Of `shoal serve`, but the one that names the file; by name, with their parameters."""
    (command,) = [command for command in app.registered_commands if command.callback.__name__ == "serve"]  # type: ignore[union-attr]
    parameters = typer.main.get_command_from_info(
        command, pretty_exceptions_short=True, rich_markup_mode=None
    ).params
    return {str(each.name): each for each in parameters if each.name not in ("config", "help")}


def fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each field that is no section, with its value; of a section that is not there, None."""
    for name, value in section:
        absent = value is None and section_of(type(section).model_fields[name].annotation)
        if isinstance(value, BaseModel):
            yield from fields(value, f"{prefix}{name}.")
        elif name == "models":
            yield from fields(value[0], "models[0].")
        elif absent:
            yield from ((f"{prefix}{name}.{part}", None) for part in absent.model_fields)
        else:
            yield f"{prefix}{name}", value


def test_every_flag_has_its_field_and_every_field_its_flag() -> None:
    assert set(flags()) == set(FIELD_OF)
    assert {field for field, _ in fields(ClusterConfig())} == set(FIELD_OF.values()) | HAVE_NO_FLAG


def test_defaults_are_the_same() -> None:
    said = {FIELD_OF[name]: parameter.default for name, parameter in flags().items()}
    assert load_config(None, {field: value for field, value in said.items() if value is not None}) == (
        load_config(None)
    )
    assert all(dict(fields(ClusterConfig()))[field] is None for field, value in said.items() if value is None)


def options_of(options: ServeOptions) -> dict[str, Any]:
    """Of a cluster with one model, the model's among them."""
    (model,) = options.models
    said = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    del said["models"]
    return said | {each.name: getattr(model, each.name) for each in dataclasses.fields(model)}


def test_every_option_of_the_product_can_be_said() -> None:
    """Each flag changes one option, and between them they change all that have one."""
    others = {"prefix_cache": "naive", "kv_cache_dtype": "bfloat16", "kv_write_policy": "write_back"}
    others |= {"speculative": "ngram"}
    others |= {"routing_policy": "round_robin", "memory": "1GiB", "kv_store_memory": "0", "stop_grace": "9s"}
    texts = {"model", "revision", "served_model_name", "host", "api_key", "address", "name"}
    texts |= {"api_keys", "admin_key", "ssl_certfile", "ssl_keyfile"}
    changed: set[str] = set()
    default = options_of(ServeOptions())
    with_another = {"ssl_keyfile": ("ssl_certfile", "another"), "min_engines": ("max_engines", 90)}
    with_another["num_draft_tokens"] = ("speculative", "ngram")
    for flag, field in FIELD_OF.items():
        overrides = {field: others.get(flag) or ("other" if flag in texts else flag in SWITCHES or 80)}
        beside = {}
        if flag in with_another:
            other, value = with_another[flag]
            beside = {FIELD_OF[other]: value}
        without, options = (
            options_of(load_config(None, said).options()) for said in (beside, beside | overrides)
        )
        (option,) = [name for name, value in options.items() if value != without[name]]
        assert option in ("http", "autoscaling") or option not in changed
        changed.add(option)
    assert changed | {"ingress_labels", "node_labels"} == set(default)


def test_fields_are_parsed_as_they_are_spelled() -> None:
    assert parsed("models[0].engine_kwargs.threads") == ("models", 0, "engine_kwargs", "threads")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What `shoal serve` comes to, in place of serving it."""
    seen: list[ServeOptions] = []
    monkeypatch.setattr(serving, "serve", lambda options, console: seen.append(options))
    return seen


def test_only_what_is_typed_or_in_the_environment_overrides_the_file(
    served: list[ServeOptions], tmp_path: Any
) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text("http: {port: 81, api_key: of-the-file}\nmodels: [{engine_kwargs: {threads: 3}}]\n")
    command = ["serve", "--config", str(file), "a/model", "--max-num-seqs", "64", "--data-parallel-size", "2"]
    result = CliRunner().invoke(app, command, env={"SHOAL_API_KEY": "of-the-environment"})
    assert result.exit_code == 0, result.output
    (options,) = served
    (model,) = options.models
    assert (model.model, model.engines, model.threads) == ("a/model", 2, 3)
    assert (options.http.port, options.http.api_key_hash) == (81, hash_of("of-the-environment"))
