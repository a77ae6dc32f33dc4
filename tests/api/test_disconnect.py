"""A client that goes away must not keep an engine busy."""

import socket
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import tokens_of

ABORT_WITHIN_S = 1.0


def aborted(dispatcher: FakeDispatcher) -> bool:
    return dispatcher.an_abort.wait(ABORT_WITHIN_S) and dispatcher.aborted == dispatcher.opened


@pytest.mark.parametrize("hangs", [False, True], ids=["while tokens flow", "while none come"])
def test_case_50_a_stream_that_is_closed(
    client: openai.OpenAI, dispatcher: FakeDispatcher, hangs: bool
) -> None:
    num_tokens = 5 if hangs else 100
    dispatcher.script = Script(token_ids=tokens_of("the") * num_tokens, pause_s=0.02, hangs=hangs)
    with client.completions.create(model="org/tiny", prompt="", max_tokens=100, stream=True) as stream:
        for _ in range(3):
            next(stream)
        assert not dispatcher.aborted
    assert aborted(dispatcher)


def test_case_50_a_stream_whose_first_token_is_not_there_yet(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    dispatcher.script = Script(hangs=True)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": "", "stream": True}, timeout=0.3)
    assert aborted(dispatcher)


def test_case_51_an_answer_that_nobody_waits_for(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(token_ids=tokens_of("the") * 3, hangs=True)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": ""}, timeout=0.5)
    assert aborted(dispatcher)


def test_a_body_that_breaks_off_is_nobodys_error(
    url: str, http: httpx.Client, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert http.get("/health").status_code == 200
    assert dispatcher.opened == []
    assert caplog.records == []
