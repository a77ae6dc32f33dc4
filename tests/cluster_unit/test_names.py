"""What Ray's dashboard and logs call an actor: which it is, of which cluster and model."""

from shoal.actors.engine.actor import EngineActor
from shoal.actors.engine.config import EngineConfig
from shoal.actors.ingress.actor import IngressActor
from shoal.actors.ingress.keys import hash_of
from shoal.actors.messages import EngineId, HttpConfig
from shoal.actors.router.actor import RouterActor
from shoal.kvstore.actor import StoreActor
from shoal.kvstore.messages import StoreId


def test_no_two_actors_of_a_cluster_have_the_same_name() -> None:
    labels = {"shoal_cluster": "default"}
    config = EngineConfig(checkpoint="c", max_model_len=64, memory_bytes=1 << 20, threads=1)
    http = HttpConfig(host="0.0.0.0", api_key_hash=hash_of("sesame"), admin_key_hash=hash_of("root"))
    names = [
        *(repr(RouterActor(16, labels={**labels, "model_name": name})) for name in ("a", "org/b")),
        *(repr(IngressActor(http, (), labels)) for _ in range(2)),  # one on each of two nodes
        repr(EngineActor(EngineId("engine-a.1f-0-3030"), config, {**labels, "model_name": "a"})),
        repr(StoreActor(StoreId("store-12ab34cd-77aa"), 1 << 20, labels)),
    ]
    assert len(set(names)) == len(names)
    assert names[:2] == ["default/router of a", "default/router of org/b"]
    assert all(
        name.startswith("default/ingress-") and name.endswith(" at 0.0.0.0:8000") for name in names[2:4]
    )
    assert names[4:] == ["default/engine-a.1f-0-3030", "default/store-12ab34cd-77aa"]
    assert not any(secret in name for name in names for secret in (hash_of("sesame"), hash_of("root")))
