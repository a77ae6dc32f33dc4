"""Where requests for a model can be computed: the engines of one deployment, as this ingress reaches them."""

from dataclasses import dataclass

from shoal.actors.ingress.links import Links
from shoal.actors.ingress.placer import Placer
from shoal.actors.ingress.stores import Stores


@dataclass(slots=True, kw_only=True, eq=False)
class Home:
    links: Links
    placer: Placer
    stores: Stores
    is_gone: bool = False
    """It is served no more: no engine of it will ever come again."""

    def computes_like(self, other: "Home") -> bool:
        """To the bit, as far as their engines have said what they compute with: an answer that has begun with
        one may go on with the other."""
        return bool(self.placer.fingerprint) and self.placer.fingerprint == other.placer.fingerprint
