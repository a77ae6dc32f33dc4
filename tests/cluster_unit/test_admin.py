"""What an operator is shown of whatever answers: a cluster with odd names, or another server."""

from dataclasses import replace

import httpx
import pytest
from rich.console import Console

from shoal.cluster.admin import AdminClient, AdminError
from shoal.cluster.status import as_dict, shown
from tests.cluster_unit.test_supervisor import Cluster, a_deployment


def test_a_models_name_is_shown_as_it_is() -> None:
    name = "org/[/b][red]模型"
    cluster = Cluster(deployments=(a_deployment(name, 1),))
    cluster.all_ready()
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown(as_dict("test", cluster.supervisor.status())))
    assert name in capture.get()
    cluster.supervisor.apply(replace(cluster.spec, deployments=(a_deployment(name, 0),)))
    cluster.passes(5.0)
    with console.capture() as capture:
        console.print(shown(as_dict("test", cluster.supervisor.status())))
    assert name in capture.get()


def test_what_drafts_are_worth_is_shown_where_there_are_some() -> None:
    cluster = Cluster(deployments=(a_deployment("drafts", 1), a_deployment("plain", 1)))
    cluster.all_ready()
    status = as_dict("test", cluster.supervisor.status())
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown(status))
    assert "drafts right" not in capture.get()
    status["models"][0]["engines"][0] |= {"draft_tokens": 1200, "accepted_draft_tokens": 900}
    with console.capture() as capture:
        console.print(shown(status))
    assert "drafts right" in capture.get() and "75% of 1,200" in capture.get()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "not you"}}, "not you"),
        ({"error": "not here"}, "not here"),
        ({"error": {}}, "answered HTTP 404"),
        ({"detail": "Not Found"}, "answered HTTP 404"),
        (["no"], "answered HTTP 404"),
    ],
)
def test_what_another_server_says_is_one_line(
    monkeypatch: pytest.MonkeyPatch, body: object, message: str
) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(404, json=body))
    monkeypatch.setattr(
        httpx.HTTPTransport, "handle_request", lambda _, request: transport.handle_request(request)
    )
    client = AdminClient("http://elsewhere", None)
    with pytest.raises(AdminError, match=message):
        client.status()
    client.close()
