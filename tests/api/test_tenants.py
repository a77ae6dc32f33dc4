"""Case 79: what one tenant has had computed is no hit for another: not in an engine, not in a store, and not
in the router's index, whose answer a client can see."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.keys import KeyEntry, KeyRing, hash_of, tenant_salt
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ModelCard
from tests.api.fakes import serving_one
from tests.api.real_engine import RealEngine
from tests.api.server import serving
from tests.ingress.clock import Clock

PROMPT = "the quick brown fox jumps over the lazy dog and the dog is not amused"
TENANTS = {"alice": "acme", "bob": "acme", "eve": "evil", "mallory": "ac", "default": None}
"""By name, which is also the key."""
NOWHERE = {"device": 0, "own_store": 0, "other_store": 0}


@dataclass
class Served:
    client: httpx.Client
    engine: RealEngine

    def ask(self, name: str, *, header: str | None = None, **more: Any) -> tuple[dict[str, int], str]:
        """How much of the prompt was found where, and what its placement went by."""
        headers = {"authorization": f"Bearer {name}"} | ({} if header is None else {"x-cache-salt": header})
        body = {"prompt": PROMPT, "max_tokens": 2, **more}
        answer = self.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["cached_tokens_by_place"], answer.headers["x-shoal-placement"]


@pytest.fixture
def served(card: ModelCard, codec: TextCodec) -> Iterator[Served]:
    clock = Clock()
    ring = KeyRing(clock)
    ring.replace(KeyEntry(name=name, hash=hash_of(name), tenant=tenant) for name, tenant in TENANTS.items())
    engine = RealEngine(card.fingerprint, card.block_size, codec.num_token_ids)
    app = create_app(models=serving_one(card, codec, engine), guard=Guard(clock, keys=ring))
    with serving(app) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield Served(client, engine)


OTHERS: list[dict[str, Any]] = [
    {"name": "eve"},
    {"name": "default"},
    {"name": "eve", "cache_salt": "acme"},
    {"name": "eve", "cache_salt": tenant_salt("acme", "")},
    {"name": "mallory", "cache_salt": "me"},
    {"name": "eve", "header": "acme"},
    {"name": "eve", "header": tenant_salt("acme", "")},
    {"name": "alice", "cache_salt": "a"},
]


@pytest.mark.parametrize("other", OTHERS)
def test_case_79_another_tenant_hits_nothing_anywhere(served: Served, other: dict[str, Any]) -> None:
    assert served.ask("alice") == (NOWHERE, "load")
    cached, by = served.ask("alice")
    assert cached["device"] > 0 and by == "prefix"
    assert served.ask(**other) == (NOWHERE, "load")
    served.engine.replace_engine()
    others, by = served.ask(**other)
    assert others["own_store"] > 0 and by == "prefix", "only what it has had computed itself"
    served.engine.replace_engine()
    cached, by = served.ask("alice")
    assert cached["own_store"] > 0 and by == "prefix"


@pytest.mark.parametrize("other", OTHERS)
def test_case_79_nor_in_the_store_alone(served: Served, other: dict[str, Any]) -> None:
    served.ask("alice")
    served.engine.replace_engine()
    assert served.ask(**other) == (NOWHERE, "load")
    cached, by = served.ask("bob")
    assert cached["own_store"] > 0 and by == "prefix"


def test_case_79_keys_of_a_tenant_share(served: Served) -> None:
    assert served.ask("alice") == (NOWHERE, "load")
    cached, by = served.ask("bob")
    assert cached["device"] > 0 and by == "prefix"


def test_case_79_a_salt_of_the_header_is_that_of_the_body(served: Served) -> None:
    served.ask("alice", header="mine")
    cached, _ = served.ask("bob", cache_salt="mine")
    assert cached["device"] > 0
    assert served.ask("bob") == (NOWHERE, "load")
    assert served.ask("bob", cache_salt="mine", header="another") == (NOWHERE, "load")
