"""What a cluster says of itself, for people and programs: the answer of `GET /admin/status`."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cluster.spec import short
from shoal.cluster.supervisor import ClusterStatus

STYLES = {"ready": "green", "joining": "yellow", "draining": "cyan"}


def as_dict(name: str, status: ClusterStatus) -> dict[str, Any]:
    return {
        "name": name,
        "ready": status.ready,
        "ingresses": [
            None if info is None else {"id": info.ingress_id, "url": info.url, "node": info.node}
            for info in status.ingresses
        ],
        "models": [
            {
                "model": deployment.model,
                "deployment": deployment.deployment_id,
                "is_outgoing": deployment.is_outgoing,
                "wanted": deployment.wanted,
                "engines": [
                    {
                        "id": engine.info.engine_id if engine.info else None,
                        "index": engine.index,
                        "phase": str(engine.phase),
                        "node": engine.info.node if engine.info else None,
                        "backend": engine.info.backend if engine.info else None,
                        "memory": engine.info.memory if engine.info else None,
                        "num_requests": engine.health.num_requests,
                        "uncomputed_tokens": engine.health.uncomputed_tokens,
                        "prefill_tokens_per_s": round(engine.health.tokens_per_s, 1),
                        "draft_tokens": engine.health.drafts.num_tokens,
                        "accepted_draft_tokens": engine.health.drafts.num_accepted,
                        "trouble": engine.trouble,
                        "doing": engine.doing,
                    }
                    for engine in deployment.engines
                ],
            }
            for deployment in status.deployments
        ],
        "stores": [
            {"id": info.store_id, "node": info.node, "budget_bytes": info.budget_bytes}
            for info in status.stores
        ],
        "leaving_nodes": sorted(status.leaving),
        "leaving_engines": sorted(status.leaving_engines),
        "troubles": list(status.troubles),
    }


def shown(status: dict[str, Any]) -> Group:
    """The same as a table, with what is amiss below it."""
    table = Table("model", "engine", "phase", "node", "requests", "tokens to compute", "prefill tokens/s")
    has_drafts = any(engine["draft_tokens"] for model in status["models"] for engine in model["engines"])
    if has_drafts:
        table.add_column("drafts right")
    table.columns[0].overflow = "fold"
    for column in table.columns[4:]:
        column.justify = "right"
    for model in status["models"]:
        for engine in model["engines"]:
            name = (engine["id"] or str(engine["index"])).removeprefix(f"engine-{model['deployment']}-")
            outgoing = " (outgoing)" if model["is_outgoing"] else ""
            table.add_row(
                Text(f"{model['model']}{outgoing}"),
                Text(name),
                _phase(engine),
                short(engine["node"] or ""),
                str(engine["num_requests"]),
                f"{engine['uncomputed_tokens']:,}",
                f"{engine['prefill_tokens_per_s']:,.0f}",
                *([_drafts(engine)] if has_drafts else []),
            )
        if not model["engines"]:
            table.add_row(Text(model["model"]), "none", "", "", "", "", "")
    doors = ", ".join(door["url"] if door else "(not ready)" for door in status["ingresses"])
    head = f"{status['name']}: {'ready' if status['ready'] else 'not ready'}; {doors}"
    lines: list[RenderableType] = [Text(head, style="bold"), table]
    leaving = [f"leaving node {short(node)}" for node in status["leaving_nodes"]]
    leaving += [f"leaving {engine}" for engine in status["leaving_engines"]]
    lines += [Text(line, style="cyan") for line in leaving]
    lines += [Text(trouble, style="yellow") for trouble in status["troubles"]]
    return Group(*lines)


def _drafts(engine: dict[str, Any]) -> str:
    drafted, accepted = engine["draft_tokens"], engine["accepted_draft_tokens"]
    return f"{accepted / drafted:.0%} of {drafted:,}" if drafted else ""


def _phase(engine: dict[str, Any]) -> Text:
    said = f"{engine['phase']}: {engine['doing']}" if engine["doing"] else engine["phase"]
    return Text(said, style=STYLES.get(engine["phase"], ""))
