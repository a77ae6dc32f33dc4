"""The file of keys, and whose a key is."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.actors.ingress.keys import (
    KeyEntry,
    KeyRing,
    hash_of,
    new_key,
    parse_keys,
    read_keys,
    tenant_salt,
)
from shoal.actors.ingress.limits import Limits
from tests.ingress.clock import Clock

HASH = hash_of("a")
YAML = f"""
keys:
  - name: alice
    hash: {HASH}
    tenant: acme
    requests_per_minute: 60
  - {{name: bob, hash: "{hash_of("b")}"}}
"""


def entry(name: str, key: str, **fields: object) -> KeyEntry:
    return KeyEntry.model_validate({"name": name, "hash": hash_of(key), **fields})


def test_a_file_names_who_may_come_in_and_how_often() -> None:
    alice, bob = parse_keys(YAML)
    assert (alice.name, alice.whose, alice.limits) == ("alice", "acme", Limits(requests_per_minute=60))
    assert (bob.name, bob.whose, bob.limits) == ("bob", "bob", Limits())


def test_json_is_yaml_too() -> None:
    assert parse_keys(f'{{"keys": [{{"name": "alice", "hash": "{HASH}"}}]}}')[0].name == "alice"


def test_an_empty_list_lets_nobody_in_and_is_no_mistake() -> None:
    assert parse_keys("keys: []") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it must be a mapping with a list `keys`"),
        ("keys", "it must be a mapping with a list `keys`"),
        ("keys:", "keys: Input should be a valid list"),
        ("keys: [", "not YAML: while parsing a flow"),
        ("keys: []\nother: 1", "other: Extra inputs are not permitted"),
        ("keys: [{name: a}]", "keys[0].hash: Field required"),
        (f"keys: [{{hash: '{HASH}'}}]", "keys[0].name: Field required"),
        ("keys: [{name: a, hash: sk-shoal-secret}]", "keys[0].hash: String should match"),
        (f"keys: [{{name: a b, hash: '{HASH}'}}]", "keys[0].name: String should match"),
        (
            f"keys: [{{name: a, hash: '{HASH}', tennant: b}}]",
            "keys[0].tennant: Extra inputs are not permitted",
        ),
        (
            f"keys: [{{name: a, hash: '{HASH}', max_concurrent: 0}}]",
            "keys[0].max_concurrent: Input should be",
        ),
        (f"keys: [{{name: a, hash: '{HASH}', tokens_per_minute: '5'}}]", "keys[0].tokens_per_minute: Input"),
        (f"keys: [{{name: a, hash: '{HASH}'}}, {{name: b, hash: '{HASH}'}}]", "two keys have the hash"),
        (f"keys: [{{name: a, hash: '{HASH}'}}, {{name: a, hash: '{hash_of('b')}'}}]", "the name a"),
    ],
)
def test_a_wrong_file_is_one_line_that_tells_no_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^--api-keys ") as raised:
        read_keys(path)
    assert message in str(raised.value) and str(path) in str(raised.value)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


yaml_like = st.text(st.sampled_from("keys: -[]{}'\"\n\t#&*!|>%@`0=.~"), max_size=40)


@given(st.text() | yaml_like | yaml_like.map(lambda text: f"keys: {text}"))
@example("[" * 10_000)
@example("keys: 2026-99-99")
@example("{1: 2}")
@example("keys: [&a {name: *a}]")
def test_whatever_is_written_there_the_worst_is_one_line(text: str) -> None:
    try:
        parse_keys(text)
    except ValueError as error:
        assert "\n" not in str(error)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--api-keys .*nowhere: No such file"):
        read_keys(tmp_path / "nowhere")


def test_a_new_key_is_another_one_and_not_in_its_hash() -> None:
    one, two = new_key(), new_key()
    assert one != two
    assert one.startswith("sk-shoal-") and len(one) >= 52, "256 bits"
    assert one not in hash_of(one)
    assert hash_of(one) == hash_of(one.encode())


def test_a_ring_knows_whose_a_key_is() -> None:
    ring = KeyRing(Clock())
    ring.replace([entry("alice", "a", tenant="acme"), entry("bob", "b")])
    alice, bob = ring.find(b"a"), ring.find(b"b")
    assert alice is not None and bob is not None
    assert (alice.name, alice.tenant, bob.name, bob.tenant) == ("alice", "acme", "bob", "bob")
    assert ring.find(b"c") is None and ring.find(b"") is None
    assert ring.find(hash_of("a").encode()) is None, "a hash is no key"


def test_a_key_that_stays_keeps_what_it_has_used_and_one_that_goes_is_gone() -> None:
    ring = KeyRing(Clock(), always=[entry("always", "z")])
    ring.replace([entry("alice", "a", requests_per_minute=2), entry("bob", "b")])
    alice = ring.find(b"a")
    assert alice is not None
    with alice.allowance.request():
        ring.replace([entry("alicia", "a", requests_per_minute=3, tenant="acme")])
        renamed = ring.find(b"a")
        assert renamed is not None
        assert (renamed.name, renamed.tenant, renamed.allowance.num_open) == ("alicia", "acme", 1)
        assert renamed.allowance.headers()["x-ratelimit-remaining-requests"] == "1"
    assert ring.find(b"b") is None
    assert ring.find(b"z") is not None
    assert len(ring) == 2


names = st.text(max_size=5) | st.sampled_from(["", "1:a", "a", "1", "10:", "2:ab"])


@given(names, names, names, names)
def test_case_79_no_two_pairs_of_tenant_and_salt_are_written_alike(
    tenant: str, salt: str, other_tenant: str, other_salt: str
) -> None:
    same = (tenant, salt) == (other_tenant, other_salt)
    assert (tenant_salt(tenant, salt) == tenant_salt(other_tenant, other_salt)) == same
