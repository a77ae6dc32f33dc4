"""The models that a front door serves, by name. One name may lead to several deployments while one takes
another's place."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shoal.actors.ingress.dispatch import Dispatcher
from shoal.actors.ingress.errors import model_not_ready, not_ready, unknown_model
from shoal.actors.ingress.generation_config import generation_defaults
from shoal.actors.ingress.intake import Intake
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import DeploymentId, ModelCard


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel:
    """What it takes to answer for one deployment."""

    deployment_id: DeploymentId
    card: ModelCard
    codec: TextCodec
    dispatcher: Dispatcher
    weight: int = 1
    """Its share of the requests beside others of its name; 0 if it is to get none."""
    intake: Intake = field(init=False)

    def __post_init__(self) -> None:
        self.intake = Intake(self.card, self.codec, generation_defaults(self.card.checkpoint))


class Models:
    def __init__(self, *served: ServedModel) -> None:
        self._served: dict[DeploymentId, ServedModel] = {}
        self._expected: tuple[str, ...] = ()
        for model in served:
            self.add(model)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._served.values()))

    def get(self, deployment_id: DeploymentId) -> ServedModel | None:
        return self._served.get(deployment_id)

    def add(self, model: ServedModel) -> None:
        self._served[model.deployment_id] = model

    def remove(self, deployment_id: DeploymentId) -> None:
        self._served.pop(deployment_id, None)

    def expect(self, names: Iterable[str]) -> None:
        """The cluster serves these, in this order; here each is as soon as its tokenizer has been read."""
        self._expected = tuple(names)

    @property
    def cards(self) -> list[ModelCard]:
        """One a name, in their order, of those that are served here."""
        cards = {model.card.name: model.card for model in self._served.values()}
        return [cards[name] for name in self._names if name in cards]

    @property
    def _names(self) -> list[str]:
        """Those that nobody has told us to expect come last."""
        served = (model.card.name for model in self._served.values())
        return list(dict.fromkeys((*self._expected, *served)))

    def named(self, name: str | None) -> ServedModel:
        """The one that answers this request. Without a name it is the first model.

        Where several are served under the name each gets its share, by chance: which one is not to depend on
        what is asked. Raises ApiError if there is none.
        """
        names = self._names
        if not names:
            raise not_ready()
        if name is None:
            name = names[0]
        candidates = [model for model in self._served.values() if model.card.name == name]
        if not candidates:
            raise model_not_ready(name) if name in names else unknown_model(name)
        weights = [model.weight for model in candidates]
        if not any(weights):
            return candidates[-1]
        return random.choices(candidates, weights)[0]
