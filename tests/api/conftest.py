from collections.abc import Iterator

import httpx
import openai
import pytest

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ModelCard
from tests.api.fakes import FakeDispatcher, serving_one
from tests.api.server import serving
from tests.ingress.checkpoints import adding_bos, byte_level_tokenizer, save_checkpoint

MAX_MODEL_LEN = 128


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"), adding_bos(byte_level_tokenizer()))
    return ModelCard(
        name="org/tiny",
        checkpoint=str(folder),
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        fingerprint=b"tiny",
    )


@pytest.fixture(scope="session")
def codec(card: ModelCard) -> TextCodec:
    return TextCodec.load(card.checkpoint)


@pytest.fixture(scope="session")
def shared_dispatcher() -> FakeDispatcher:
    return FakeDispatcher()


@pytest.fixture(scope="session")
def url(card: ModelCard, codec: TextCodec, shared_dispatcher: FakeDispatcher) -> Iterator[str]:
    app = create_app(models=serving_one(card, codec, shared_dispatcher), max_body_bytes=2**20)
    with serving(app) as url:
        yield url


@pytest.fixture
def dispatcher(shared_dispatcher: FakeDispatcher) -> FakeDispatcher:
    """The server's dispatcher, with nothing in it of tests before."""
    shared_dispatcher.forget()
    return shared_dispatcher


@pytest.fixture(scope="session")
def shared_http(url: str) -> Iterator[httpx.Client]:
    # Making a client loads the system's certificates, which takes longer than most tests.
    with httpx.Client(base_url=url, timeout=10) as http:
        yield http


@pytest.fixture(scope="session")
def shared_client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        yield client


@pytest.fixture
def http(shared_http: httpx.Client, dispatcher: FakeDispatcher) -> httpx.Client:
    return shared_http


@pytest.fixture
def client(shared_client: openai.OpenAI, dispatcher: FakeDispatcher) -> openai.OpenAI:
    return shared_client
