"""A cluster's YAML: what it comes to, and every problem of it as one line with the way out."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.actors.ingress.keys import hash_of
from shoal.cluster.autoscaler import AutoscalingConfig
from shoal.cluster.cli import app
from shoal.cluster.config import ClusterConfig, ConfigError, load_config
from shoal.cluster.config.models import Section
from shoal.cluster.config.quantities import format_duration, parse_duration
from shoal.cluster.options import ServeOptions

EVERYTHING = """\
name: prod
address: 10.0.0.1:6379
stop_grace: 1.5m
http: {host: 0.0.0.0, port: 80, ingresses: 2, api_key: sesame}
kv_store: {memory: 2GiB}
routing_policy: least_loaded
models:
  - model_id: smol
    model_source: org/model
    revision: main
    num_replicas: 3
    engine_kwargs:
      threads: 2
      memory: 4GiB
      kv_cache_dtype: bfloat16
      require_kernels: true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shoal.yaml"


def problems(file: Path, text: str, **overrides: Any) -> list[str]:
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file, overrides)
    lines = str(raised.value).splitlines()
    assert len(lines) == len(raised.value.problems), "each is one line"
    return [line.replace(str(file), "FILE") for line in lines]


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "models: [{}]"])
def test_a_file_that_says_nothing_is_a_command_line_that_says_nothing(file: Path, text: str) -> None:
    file.write_text(text)
    assert load_config(file).options() == ServeOptions() == load_config(None).options()


def test_what_a_file_comes_to(file: Path) -> None:
    file.write_text(EVERYTHING)
    options = load_config(file).options()
    (model,) = options.models
    assert (options.name, options.address, options.stop_grace_s) == ("prod", "10.0.0.1:6379", 90.0)
    assert (options.http.host, options.http.port) == ("0.0.0.0", 80)
    assert options.http.api_key_hash == hash_of("sesame")
    assert (options.ingresses, model.engines, model.threads) == (2, 3, 2)
    assert (model.model, model.revision) == ("org/model", "main")
    assert (model.served_model_name, options.kv_store_bytes) == ("smol", 2 << 30)
    assert (model.memory_bytes, model.kv_cache_dtype) == (4 << 30, "bfloat16")
    assert (options.routing_policy, model.require_kernels) == ("least_loaded", True)


def test_what_a_cluster_of_several_models_comes_to(file: Path) -> None:
    file.write_text("""
detached: true
drain_timeout: 5m
http: {on_nodes: {door: "yes"}, tls: {certificate: a.pem}, api_keys: keys.yaml, admin_key: root}
models:
- model_id: a
  node_labels: {zone: b}
  num_replicas: 2
  autoscaling_config: {max_replicas: 4, target_ttft_s: 1}
- {model_id: b}
""")
    options = load_config(file).options()
    assert (options.is_detached, options.drain_s, options.ingress_labels) == (True, 300, {"door": "yes"})
    http = options.http
    assert http.ssl_certfile and Path(http.ssl_certfile).is_absolute()
    assert http.api_keys and Path(http.api_keys).name == "keys.yaml"
    assert (http.ssl_keyfile, http.admin_key_hash) == (None, hash_of("root"))
    a, b = options.models
    assert (a.served_model_name, a.engines, a.node_labels) == ("a", 2, {"zone": "b"})
    assert a.autoscaling == AutoscalingConfig(min_replicas=1, max_replicas=4, target_ttft_s=1)
    assert (b.served_model_name, b.engines, b.autoscaling) == ("b", 1, None)


def test_flags_override_a_file(file: Path) -> None:
    file.write_text(EVERYTHING)
    overrides = {"http.port": 0, "models[0].engine_kwargs.max_num_seqs": 8, "kv_store.memory": "0"}
    options = load_config(file, overrides).options()
    assert (options.http.port, options.models[0].max_num_seqs, options.kv_store_bytes) == (0, 8, 0)
    assert (options.http.host, options.models[0].threads) == ("0.0.0.0", 2), "what no flag says is the file's"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nme: a", "FILE:1: nme is not known: did you mean name?"),
        ("xyz: a", "FILE:1: xyz is not known: there are name, address, detached, stop_grace, drain_timeout, "
         "http, kv_store, routing_policy, models"),
        ("models:\n- engine_kwargs:\n    max_num_seq: 1",
         "FILE:3: models[0].engine_kwargs.max_num_seq is not known: did you mean max_num_seqs?"),
        ("models:\n- engine_kwargs:\n    max_num_seqs: 0",
         "FILE:3: models[0].engine_kwargs.max_num_seqs must be at least 1, got 0"),
        ("http: {port: 70000}", "FILE:1: http.port must be at most 65535, got 70000"),
        ("http: {port: '80'}", "FILE:1: http.port must be a whole number, got '80'"),
        ("http: {host: 10.5}", "FILE:1: http.host must be text, got 10.5: put it in quotes"),
        ("http: {host: ''}", "FILE:1: http.host must not be empty: say it, or leave it out"),
        ("http: {api_key: 12345}", "FILE:1: http.api_key must be text, got another: put it in quotes"),
        ("http: {admin_key: 12345}", "FILE:1: http.admin_key must be text, got another: put it in quotes"),
        ("http: {admin_key_hash: 12345}",
         "FILE:1: http.admin_key_hash must be text, got another: put it in quotes"),
        ("http: {tls: {key: a.pem}}", "FILE:1: http.tls.certificate is missing: say it too"),
        ("http:\n  port: 65534\n  ingresses: 3",
         "FILE:2: http.port 65534 leaves no room for 3 ingresses: lower one of them"),
        ("http: {on_nodes: {a: b}, ingresses: 3}",
         "FILE:1: http.on_nodes has one front door a node: drop ingresses, or drop on_nodes"),
        ("http:", "FILE:1: http must have fields of its own, each as `name: value`, got None"),
        ("routing_policy: magic", "FILE:1: routing_policy must be 'cost', 'round_robin', 'least_loaded' or "
         "'greedy_prefix', got 'magic'"),
        ("stop_grace: soon", "FILE:1: stop_grace: 'soon' is not a duration; write it like 30s or 5m"),
        ("stop_grace: 99999999h", "FILE:1: stop_grace must be at most 604800, got '99999999h'"),
        ("stop_grace: yes", "FILE:1: stop_grace must be a duration; write it like 30s or 5m"),
        ("kv_store: {memory: lots}",
         "FILE:1: kv_store.memory: 'lots' is not a memory size; write it like 4GiB or 512MiB"),
        ("models: [{engine_kwargs: {memory: 0}}]",
         "FILE:1: models[0].engine_kwargs.memory: '0' is not a memory size; write it like 4GiB or 512MiB"),
        ("models: [{engine_kwargs: {memory: [4]}}]",
         "FILE:1: models[0].engine_kwargs.memory must be a memory size; write it like 4GiB or 512MiB"),
        ("models: [{engine_kwargs: {require_kernels: 1}}]",
         "FILE:1: models[0].engine_kwargs.require_kernels must be true or false, got 1"),
        ("models:\n- engine_kwargs:\n    block_size: 17",
         "FILE:3: models[0].engine_kwargs.block_size must be a multiple of 16, got 17"),
        ("models: [{engine_kwargs: {max_num_batched_tokens: 8}}]",
         "FILE:1: models[0].engine_kwargs.max_num_batched_tokens (8) must be at least max_num_seqs (64), or "
         "a full decode step would not fit"),
        ("models: {model_id: a}",
         "FILE:1: models must be a list, each item behind `- `, got fields"),
        ("models: []", "FILE:1: models must not be empty: say one, or leave it out"),
        ("models: [{model_id: a}, {model_id: a}]",
         "FILE:1: two models are called a: give each a model_id of its own"),
        ("models: [{autoscaling_config: {min_replicas: 2}}]",
         "FILE:1: models[0].autoscaling_config.max_replicas 1 is below min_replicas 2: raise it"),
        ("name: a b", "FILE:1: name may have letters, digits, '.', '_' and '-', got 'a b'"),
        ("name: a\nhttp: {}\nname: b", "FILE:3: says name twice, first in line 1: drop one"),
        ("name: a\nhttp: [", "FILE:2: is not YAML: expected the node content, but found '<stream end>'"),
        ("name: a\n---\nname: b", "FILE:2: is not YAML: but found another document"),
        ("- a", "FILE:1: must have fields of its own, each as `name: value`, got a list"),
        ("plain words", "FILE:1: must have fields of its own, each as `name: value`, got 'plain words'"),
        ("name: \x07",
         "FILE:1: is not YAML: unacceptable character #x0007: special characters are not allowed"),
        ("name: &a [*a]", "FILE:1: name must be text, got a list: put it in quotes"),
        ("name: " + 2000 * "[", "FILE:1: is nested too deeply: flatten it"),
        ("name: 2026-99-99", "FILE:1: is not YAML: month must be in 1..12"),
    ],
)  # fmt: skip
def test_a_problem_is_a_line(file: Path, text: str, problem: str) -> None:
    assert problems(file, text) == [problem]


def test_all_problems_are_told_at_once_in_the_order_of_the_file(file: Path) -> None:
    text = "nme: a\nmodels:\n- engine_kwargs: {threads: 0}\nhttp: {port: -1}\nkv_store: {memory: x}\n"
    assert [line.split(" ")[1] for line in problems(file, text)] == [
        "nme",
        "models[0].engine_kwargs.threads",
        "http.port",
        "kv_store.memory:",
    ]


def test_a_flag_is_named_as_it_was_typed(file: Path) -> None:
    overrides = {"models[0].engine_kwargs.block_size": 17, "http.port": 70000, "name": "a b"}
    assert problems(file, "", **overrides) == [
        "--name may have letters, digits, '.', '_' and '-', got 'a b'",
        "--port must be at most 65535, got 70000",
        "--block-size must be a multiple of 16, got 17",
    ]


def test_flags_of_a_model_have_no_meaning_beside_several(file: Path) -> None:
    text = "models: [{model_id: a}, {model_id: b}]"
    (problem,) = problems(file, text, **{"models[0].num_replicas": 2, "http.port": 0})
    assert problem == "--engines is of one model, and FILE has 2: say it there"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: cannot be read \(No such file .*\): check its name$"):
        load_config(tmp_path / "x.yaml")
    (tmp_path / "y.yaml").write_bytes(b"name: \xff\xff\n")
    with pytest.raises(ConfigError, match=r"y\.yaml:1: is not text in UTF-8"):
        load_config(tmp_path / "y.yaml")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("models: [{accelerator_type: H200}]", ["models[0].accelerator_type"]),
    ],
)
def test_what_this_version_cannot_do_is_refused_and_never_ignored(
    file: Path, text: str, fields: list[str]
) -> None:
    for line, name in zip(problems(file, text), fields, strict=True):
        assert line.startswith(f"FILE:1: {name} is not served by this version: ")


@given(st.one_of(st.integers(0, 10**9 - 1), st.decimals(0, 10**6, places=3)))
def test_a_duration_is_read_as_it_is_written(seconds: Any) -> None:
    assert parse_duration(format_duration(float(seconds))) == float(seconds)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("1.5h", 5400), ("500ms", 0.5), ("7", 7), ("2 min", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


NAMES = st.sampled_from(sorted({name for each in Section.__subclasses__() for name in each.model_fields}))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates()
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | SCALARS, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(NAMES | SCALARS, ANYTHING, max_size=4),
    st.sampled_from([{}, {"models[0].num_replicas": 2}]),
)
def test_whatever_a_file_says_is_taken_or_refused_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, data: Any, overrides: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    try:
        load_config(file, overrides)
    except ConfigError as error:
        assert len(str(error).splitlines()) == len(error.problems) > 0


@given(st.integers(1, 1 << 44))
def test_what_a_configuration_comes_to_is_a_configuration(num_bytes: int) -> None:
    config = ClusterConfig.model_validate({"kv_store": {"memory": num_bytes}})
    again = ClusterConfig.model_validate(config.model_dump(mode="json", exclude_none=True))
    assert again == config


def check(file: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["config", "check", str(file)], env={"COLUMNS": "80"})
    return result.exit_code, result.output


def test_config_check_prints_what_a_file_comes_to_and_no_secret(file: Path, tmp_path: Path) -> None:
    file.write_text(EVERYTHING)
    status, printed = check(file)
    assert status == 0
    assert "sesame" not in printed
    assert "max_num_batched_tokens: 512" in printed, "defaults too"
    (tmp_path / "again.yaml").write_text(printed.replace("'**********'", "sesame"))
    assert load_config(tmp_path / "again.yaml") == load_config(file)


def test_config_check_fails_with_every_problem(file: Path) -> None:
    file.write_text("nme: a\nhttp: {port: -1}\n")
    status, printed = check(file)
    assert status == 1
    assert printed.splitlines() == [
        f"error: {file}:1: nme is not known: did you mean name?",
        f"{file}:2: http.port must be at least 0, got -1",
    ]
