"""What the router tells of itself."""

from collections.abc import Iterator

from prometheus_client import Metric

from shoal.actors.router.members import Members
from shoal.kvstore.families import gauge, gauges, signs_of_life, total


def router_metrics(members: Members) -> Iterator[Metric]:
    yield from signs_of_life("router")
    size = members.directory.size
    yield gauges(
        "shoal_router_members",
        "Engines and stores that may be placed on and fetched from.",
        "kind",
        {"engine": len(members.engines), "store": len(members.stores)},
    )
    yield gauge(
        "shoal_router_up_to_date",
        "1 if every report of theirs was heard and kept, else 0: a prefix may be overlooked.",
        members.is_up_to_date,
    )
    yield gauge("shoal_router_index_keys", "Blocks and state segments that somebody holds.", size.num_keys)
    yield gauge("shoal_router_index_entries", "The same, once for each holder.", size.num_entries)
    yield gauge("shoal_router_index_bytes", "Memory of the index, about.", size.num_bytes)
    yield total(
        "shoal_router_index_dropped", "Entries left out of the index for want of room.", size.num_dropped
    )
    yield total("shoal_router_snapshots", "Snapshots that had to be asked for.", members.num_snapshots)
