"""Which deployment answers a request, by the name that it asks for."""

from collections import Counter

import pytest

from shoal.actors.ingress.errors import ApiError
from shoal.actors.ingress.models import Models, ServedModel
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import DeploymentId, ModelCard
from tests.api.fakes import FakeDispatcher
from tests.ingress.checkpoints import byte_level_tokenizer, save_checkpoint


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(save_checkpoint(tmp_path_factory.mktemp("tiny"), byte_level_tokenizer()))


def served(codec: TextCodec, name: str, generation: int = 1, *, weight: int = 1) -> ServedModel:
    card = ModelCard(name=name, checkpoint="", max_model_len=64, block_size=4, fingerprint=b"f")
    return ServedModel(
        deployment_id=DeploymentId(f"{name}.{generation}"),
        card=card,
        codec=codec,
        dispatcher=FakeDispatcher(),
        weight=weight,
    )


def test_a_request_goes_to_the_model_that_it_names_and_without_a_name_to_the_first(codec: TextCodec) -> None:
    a, b = served(codec, "a"), served(codec, "b")
    models = Models(a, b)
    assert (models.named("b"), models.named(None)) == (b, a)
    assert [card.name for card in models.cards] == ["a", "b"]


def test_a_name_that_is_not_served_is_a_404_and_no_model_at_all_a_503(codec: TextCodec) -> None:
    with pytest.raises(ApiError) as unknown:
        Models(served(codec, "a")).named("c")
    with pytest.raises(ApiError) as nobody:
        Models().named("a")
    assert (unknown.value.status, nobody.value.status) == (404, 503)


def test_what_is_expected_keeps_its_place_and_is_said_to_come(codec: TextCodec) -> None:
    b = served(codec, "b")
    models = Models(b)
    models.expect(["a", "b"])
    for name in ("a", None):
        with pytest.raises(ApiError) as not_yet:
            models.named(name)
        assert (not_yet.value.status, not_yet.value.code) == (503, "model_not_ready")
    assert [card.name for card in models.cards] == ["b"]
    models.add(served(codec, "a"))
    assert [card.name for card in models.cards] == ["a", "b"]
    assert models.named(None).card.name == "a", "whichever came first"


def test_while_one_takes_anothers_place_each_has_its_share(codec: TextCodec) -> None:
    old, new = served(codec, "a", 1, weight=3), served(codec, "a", 2, weight=1)
    models = Models(old, new)
    chosen = Counter(models.named("a").deployment_id for _ in range(4000))
    assert 2700 < chosen[old.deployment_id] < 3300
    assert len(models.cards) == 1
    old.weight = 0
    assert {models.named("a").deployment_id for _ in range(100)} == {new.deployment_id}
    new.weight = 0
    assert models.named("a") is new, "who has no engine at all says so itself"
    models.remove(new.deployment_id)
    assert models.named("a") is old
