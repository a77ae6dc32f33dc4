"""The application without a server: an API key, and whatever JSON there may be."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ModelCard
from tests.api.fakes import FakeDispatcher, Script, guarding, serving_one
from tests.ingress.checkpoints import tokens_of

KEY = "sk-schlüssel-à"


def ask(app: FastAPI, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shoal") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(asked())


@pytest.fixture(scope="module")
def locked(card: ModelCard, codec: TextCodec) -> FastAPI:
    return create_app(models=serving_one(card, codec, FakeDispatcher()), guard=guarding(KEY))


@pytest.fixture(scope="module")
def app(card: ModelCard, codec: TextCodec) -> FastAPI:
    dispatcher = FakeDispatcher()
    dispatcher.script = Script(token_ids=tokens_of("alpha"))
    return create_app(models=serving_one(card, codec, dispatcher))


@pytest.mark.parametrize("authorization", [None, "", KEY, "Bearer", "Bearer sk", f"bearer{KEY}", "Bearer é"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions")])
def test_without_the_key_there_is_no_answer(
    locked: FastAPI, method: str, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode()}
    response = ask(locked, method, path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_with_the_key_there_is(locked: FastAPI) -> None:
    headers = {"authorization": f"Bearer {KEY}".encode()}
    assert ask(locked, "GET", "/v1/models", headers=headers).status_code == 200


def test_health_needs_no_key(locked: FastAPI) -> None:
    assert ask(locked, "GET", "/health").status_code == 200
    assert ask(locked, "GET", "/ready").status_code == 200


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | values,
            "content": st.text(max_size=20) | st.just([{"type": "text", "text": "Hello"}]) | values,
            "name": values,
        },
    )
    | values,
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages | values,
        "prompt": st.text(max_size=300) | values,
        "model": st.just("org/tiny") | values,
        "temperature": st.floats(-0.5, 2.5) | values,
        "top_p": st.floats(-0.5, 1.5) | values,
        "max_tokens": st.integers(-1, 140) | values,
        "stop": st.lists(st.text(max_size=3), max_size=5) | values,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": values}) | values,
    }
    | dict.fromkeys(
        ["top_k", "seed", "stream", "n", "tools", "logit_bias", "anything", "echo", "logprobs", "timeout"],
        values,
    ),
)
plausible = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "Hello"}]), "prompt": st.text(max_size=20)},
    optional={
        "stream": st.booleans(),
        "temperature": scalars,
        "max_tokens": scalars,
        "stop": st.text(),
        "echo": st.booleans(),
        "logprobs": st.booleans() | st.integers(0, 3),
        "top_logprobs": st.integers(0, 3),
        "logit_bias": st.dictionaries(st.integers(0, 330).map(str), st.integers(-101, 101), max_size=2),
        "min_tokens": st.integers(0, 20),
    },
)


PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
id_lists = st.lists(st.integers(-1, 330), max_size=5)
ids = st.fixed_dictionaries(
    {"prompt": id_lists | st.lists(id_lists | st.text(), max_size=3), "tokens": id_lists},
    optional={"echo": st.booleans(), "logprobs": st.integers(0, 3), "max_tokens": st.integers(0, 3)},
)


@given(path=PATHS, body=bodies | plausible | ids | values)
def test_no_json_is_our_failure(app: FastAPI, path: str, body: Any) -> None:
    response = ask(app, "POST", path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@given(path=PATHS, body=st.binary(max_size=60))
def test_no_bytes_are(app: FastAPI, path: str, body: bytes) -> None:
    assert ask(app, "POST", path, content=body).status_code == 400
