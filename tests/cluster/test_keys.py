"""Keys over real Ray: tenants share nothing, also behind an engine that is gone, and keys come and go."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray

from shoal.actors.ingress.keys import KeyEntry, hash_of
from shoal.cluster.key_file import HEAD, add_key, as_yaml
from tests.cluster.served import Served, wait_for
from tests.cluster.test_store_processes import believed, followed, knows_its_store, stored

ADMIN_KEY = "root"
PROMPT = list(range(3, 303))
"""300 tokens: 18 complete blocks of 16, the last of which is computed for the logits."""
CACHED = 288


@dataclass
class Guarded:
    served: Served
    file: Path

    def ask(self, key: str, **more: str) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.served.url}/v1/completions", json=body, headers=headers, timeout=60)

    def cached(self, key: str, **more: str) -> dict[str, int]:
        """By place, where there is any."""
        answer = self.ask(key, **more)
        assert answer.status_code == 200, answer.text
        places = answer.json()["usage"]["cached_tokens_by_place"]
        return {place: tokens for place, tokens in places.items() if tokens}


def entry(name: str, tenant: str | None = None) -> KeyEntry:
    """Its key is its name."""
    return KeyEntry(name=name, hash=hash_of(name), tenant=tenant)


def replace_engine(served: Served) -> None:
    """By another, which finds in the store all that the first has computed."""
    [engine], [store] = served.engine_names(), served.store_names()
    computed = set(ray.get(served.actor(engine).snapshot.remote(), timeout=10).block_keys)
    wait_for(lambda: stored(served) >= computed and believed(served, store) >= computed, "all is saved")
    os.kill(served.pid(engine), signal.SIGKILL)
    wait_for(lambda: served.engine_names() not in ([], [engine]), "a new engine")
    wait_for(lambda: knows_its_store(served), "it is ready and introduced")
    wait_for(lambda: served.get("/ready") == 200, "it is placed on")


@pytest.fixture(scope="module")
def guarded(
    ray_address: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    for known in (entry("alice", "acme"), entry("bob", "acme"), entry("eve")):
        add_key(file, known)
    flags = ("--api-keys", str(file), "--admin-key", ADMIN_KEY, "--kv-store-memory", "40MiB")
    with Served.start(checkpoint, ray_address, *flags) as served:
        served.wait_until_ready()
        wait_for(lambda: len(followed(served)) == 1, "the router follows the store")
        yield Guarded(served, file)


def test_case_79_tenants_share_nothing_on_engine_store_and_index(guarded: Guarded) -> None:
    assert guarded.cached("alice") == {}
    assert guarded.cached("bob") == {"device": CACHED}
    assert guarded.cached("eve", cache_salt="acme") == {}
    assert guarded.cached("eve", cache_salt="4:acme") == {}
    replace_engine(guarded.served)
    # First of all: an engine that has computed so small a model once knows that this is as fast as a fetch.
    assert guarded.cached("bob") == {"own_store": CACHED}
    assert guarded.cached("eve") == {}


def test_keys_come_and_go_while_it_serves(guarded: Guarded) -> None:
    assert guarded.ask("carol").status_code == 401
    add_key(guarded.file, entry("carol"))
    wait_for(lambda: guarded.ask("carol").status_code == 200, "the new key", within_s=10)
    guarded.file.write_text("keys: [")
    guarded.file.write_text(HEAD + as_yaml(entry("alice", "acme")))
    wait_for(lambda: guarded.ask("carol").status_code == 401, "it is taken away", within_s=10)
    assert guarded.ask("alice").status_code == 200


def test_operators_have_a_key_of_their_own(guarded: Guarded) -> None:
    url = f"{guarded.served.url}/debug/invariants"
    statuses = [
        httpx.get(url, headers={"authorization": f"Bearer {key}"}, timeout=30).status_code
        for key in (ADMIN_KEY, "alice")
    ]
    assert [*statuses, guarded.served.get("/debug/invariants")] == [200, 401, 401]
