"""The manifests for KubeRay: valid by Kubernetes' schemas, and of one mind with each other and serve.yaml.

KubeRay's schema is in no package index, so the fields of its own that we use are written down here (KubeRay
1.6). What Kubernetes defines, pod templates included, is checked against its schemas, strictly.
"""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from shoal.cluster.config.quantities import parse_duration
from shoal.cluster.host_memory import needed_object_store_bytes
from shoal.kvstore.sizes import parse_size

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "configs" / "kuberay"
KUBERNETES = "1.32"
CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_FIELDS = {"rayStartParams", "template"}
WORKER_FIELDS = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "labels", "rayStartParams", "template"),
}
JOB_FIELDS = {
    *("entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "rayClusterSpec"),
}
RAY_START_PARAMS = {"num-cpus", "dashboard-host", "object-store-memory"}


def documents() -> list[dict[str, Any]]:
    names = [*KUSTOMIZATION["resources"], "batch.yaml"]
    return [document for name in names for document in yaml.safe_load_all((KUBERAY / name).read_text())]


KUSTOMIZATION: dict[str, Any] = yaml.safe_load((KUBERAY / "kustomization.yaml").read_text())
SERVE: dict[str, Any] = yaml.safe_load((KUBERAY / "serve.yaml").read_text())
ENGINE: dict[str, Any] = SERVE["models"][0]["engine_kwargs"]
DOCUMENTS = documents()


def of_kind(kind: str) -> list[dict[str, Any]]:
    found = [document for document in DOCUMENTS if document["kind"] == kind]
    assert found, kind
    return found


(CLUSTER,), (RAY_JOB,), (SERVICE,), (SUBMITTER,) = map(of_kind, ("RayCluster", "RayJob", "Service", "Job"))
SPECS: dict[str, dict[str, Any]] = {"cluster": CLUSTER["spec"], "job": RAY_JOB["spec"]["rayClusterSpec"]}


def groups(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"headgroup": spec["headGroupSpec"]} | {
        group["groupName"]: group for group in spec["workerGroupSpecs"]
    }


GROUPS = groups(CLUSTER["spec"])
ALL_GROUPS = [(f"{of}/{name}", group) for of, spec in SPECS.items() for name, group in groups(spec).items()]
each_group = pytest.mark.parametrize(
    "group", [group for _, group in ALL_GROUPS], ids=[name for name, _ in ALL_GROUPS]
)


def pod(group: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = group["template"]["spec"]
    return spec


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(group)["containers"]
    return dict(only)


def labels(name: str) -> dict[str, str]:
    """Those that KubeRay gives to a group's pods, and the group's own."""
    kind = "head" if name == "headgroup" else "worker"
    own: dict[str, str] = GROUPS[name].get("labels", {})
    return {
        "ray.io/cluster": CLUSTER["metadata"]["name"],
        "ray.io/group": name,
        "ray.io/node-type": kind,
    } | own


def selected(selector: dict[str, str]) -> set[str]:
    return {name for name in GROUPS if selector.items() <= labels(name).items()}


def bytes_of(quantity: str) -> int:
    assert quantity.endswith("i"), f"{quantity}: powers of two, as everywhere here"
    return parse_size(f"{quantity}B")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata'].get('name', '')}")
def test_what_kubernetes_defines_is_valid(document: dict[str, Any]) -> None:
    if document["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@each_group
def test_the_pods_of_a_ray_cluster_are_valid(group: dict[str, Any]) -> None:
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "x"},
        "template": group["template"],
    }
    kubernetes_validate.validate(template, KUBERNETES, strict=True)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_kuberay_s_own_fields(spec: dict[str, Any]) -> None:
    assert set(spec) == CLUSTER_FIELDS
    assert set(spec["headGroupSpec"]) <= HEAD_FIELDS
    assert all(set(group) <= WORKER_FIELDS for group in spec["workerGroupSpecs"])
    for group in groups(spec).values():
        assert set(group["rayStartParams"]) <= RAY_START_PARAMS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert set(RAY_JOB["spec"]) == JOB_FIELDS


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_ray_of_the_image_token_and_a_head_that_computes_nothing(spec: dict[str, Any]) -> None:
    pinned = re.search(r"ray\[default\]==(\d+\.\d+)\.\*", (ROOT / "pyproject.toml").read_text())
    assert pinned and spec["rayVersion"].startswith(f"{pinned[1]}.")
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@each_group
def test_what_is_mounted_is_there_and_what_is_there_is_mounted(group: dict[str, Any]) -> None:
    mounts = container(group)["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod(group)["volumes"]}
    assert len({mount["mountPath"] for mount in mounts}) == len(mounts)


@each_group
def test_shared_memory_is_memory_and_holds_ray_s_objects(group: dict[str, Any]) -> None:
    (mount,) = [mount for mount in container(group)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in pod(group)["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    limit = bytes_of(container(group)["resources"]["limits"]["memory"])
    shared = bytes_of(volume["emptyDir"]["sizeLimit"])
    objects = int(group["rayStartParams"].get("object-store-memory", 0))
    assert objects <= shared < limit
    if group.get("groupName") == "engine":
        assert shared + parse_size(ENGINE["memory"]) <= limit, (
            "what lies in /dev/shm counts as the container's"
        )
        assert needed_object_store_bytes(parse_size(SERVE["kv_store"]["memory"])) <= objects


def test_an_engine_fits_a_pod_of_its_group_and_no_other() -> None:
    cpus = {name: int(container(group)["resources"]["limits"]["cpu"]) for name, group in GROUPS.items()}
    assert max(cpus["headgroup"], cpus["ingress"]) < ENGINE["threads"] <= cpus["engine"]
    assert SERVE["models"][0]["num_replicas"] <= GROUPS["engine"]["minReplicas"]


@each_group
def test_no_pod_is_killed_before_its_streams_have_ended(group: dict[str, Any]) -> None:
    grace, streams = pod(group)["terminationGracePeriodSeconds"], parse_duration(SERVE["stop_grace"])
    assert grace > streams
    if hook := container(group).get("lifecycle"):
        _, slept = hook["preStop"]["exec"]["command"]
        assert streams < int(slept) < grace


def test_front_doors_are_where_the_service_looks() -> None:
    assert selected(SERVICE["spec"]["selector"]) == {"ingress"}
    assert SERVE["http"]["on_nodes"].items() <= GROUPS["ingress"]["labels"].items()
    assert GROUPS["engine"]["labels"].items().isdisjoint(SERVE["http"]["on_nodes"].items())
    door = container(GROUPS["ingress"])
    ports = {port["name"]: port["containerPort"] for port in door["ports"]}
    (port,) = SERVICE["spec"]["ports"]
    assert ports[port["targetPort"]] == SERVE["http"]["port"]
    assert door["readinessProbe"]["httpGet"] == {"path": "/ready", "port": port["targetPort"]}
    assert SERVE["http"]["host"] == "0.0.0.0", "the kubelet and the service are other machines"


def test_a_ray_job_has_no_readiness_of_ours() -> None:
    """It waits until all pods are ready, and they would be when it has started: never."""
    assert not any("readinessProbe" in container(group) for group in groups(SPECS["job"]).values())


def test_budgets_are_about_pods_there_are_and_leave_room_to_move() -> None:
    budgets = {frozenset(selected(each["spec"]["selector"]["matchLabels"])): each["spec"] for each in
               of_kind("PodDisruptionBudget")}  # fmt: skip
    assert set(budgets) == {frozenset({name}) for name in GROUPS}, "one each"
    assert budgets[frozenset({"ingress"})]["minAvailable"] < GROUPS["ingress"]["minReplicas"]


def test_the_network_lets_in_clients_to_front_doors_and_the_submitter_to_ray() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("NetworkPolicy")}
    assert selected(policies["shoal-ray"]["podSelector"]["matchLabels"]) == set(GROUPS)
    assert selected(policies["shoal-clients"]["podSelector"]["matchLabels"]) == {"ingress"}
    assert policies["shoal-clients"]["ingress"] == [{"ports": [{"port": SERVE["http"]["port"]}]}]
    let_in = [peer["podSelector"]["matchLabels"] for peer in policies["shoal-ray"]["ingress"][0]["from"]]
    assert selected(let_in[0]) == set(GROUPS)
    assert let_in[1].items() <= SUBMITTER["spec"]["template"]["metadata"]["labels"].items()


def test_the_submitter_finds_ray_its_token_and_the_file() -> None:
    (submit,) = SUBMITTER["spec"]["template"]["spec"]["containers"]
    name = CLUSTER["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in container(GROUPS["headgroup"])["ports"]}
    assert f"--address=http://{name}-head-svc:{ports['dashboard']}" in submit["args"]
    token = next(each for each in submit["env"] if each["name"] == "RAY_AUTH_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}, (
        "as the operator makes it"
    )
    config = submit["args"][-1].split("--config ")[1]
    assert config == f"{mount_of(GROUPS['headgroup'], 'serve')}/serve.yaml"
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    volumes = {volume["name"]: volume for volume in pod(GROUPS["headgroup"])["volumes"]}
    assert volumes["serve"]["configMap"]["name"] == generated["name"]
    assert generated["files"] == ["serve.yaml"]
    assert SERVE["http"]["api_keys"].startswith(f"{mount_of(GROUPS['ingress'], 'keys')}/")


def mount_of(group: dict[str, Any], volume: str) -> str:
    (path,) = [each["mountPath"] for each in container(group)["volumeMounts"] if each["name"] == volume]
    return str(path)


def test_every_manifest_is_applied_and_every_image_is_the_reader_s() -> None:
    files = {path.name for path in KUBERAY.glob("*.yaml")}
    assert files == {*KUSTOMIZATION["resources"], "batch.yaml", "kustomization.yaml", "serve.yaml"}
    (image,) = KUSTOMIZATION["images"]
    images = {each["image"] for group in GROUPS.values() for each in pod(group)["containers"]}
    images |= {each["image"] for each in SUBMITTER["spec"]["template"]["spec"]["containers"]}
    assert images == {image["name"]}
    assert {container(group)["image"] for group in groups(SPECS["job"]).values()} == {
        f"{image['newName']}:{image['newTag']}"
    }
    assert all(each["metadata"]["name"] for each in DOCUMENTS if each["kind"] != "RayJob")


def test_no_secret_is_written_down() -> None:
    assert "Secret" not in {document["kind"] for document in DOCUMENTS}
    environment = [
        each for _, group in ALL_GROUPS for each in container(group)["env"] if "TOKEN" in each["name"]
    ]
    assert environment and all("valueFrom" in each for each in environment)
