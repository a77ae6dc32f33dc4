#!/usr/bin/env bash
# What we could not try: does this start, answer, and lose a front door without a cut stream, on your Kubernetes?
#
#   configs/kuberay/smoke.sh            kubectl's current context, namespace shoal; leaves the cluster running
#   configs/kuberay/smoke.sh --delete   takes the namespace away at the end, with all that is in it
#
# Needs kubectl, curl, the KubeRay operator (1.6 or newer), your image in kustomization.yaml, and in the namespace:
# the secret shoal-keys (keys.yaml), a ReadWriteMany claim shoal-models, and for a gated model the secret shoal-hub.
# SHOAL_API_KEY is one of the keys.
set -euo pipefail
cd "$(dirname "$0")"
: "${SHOAL_API_KEY:?a key of the secret shoal-keys}"
namespace=shoal
wait_s=${SMOKE_WAIT_S:-900}
k() { kubectl --namespace "$namespace" "$@"; }
say() { printf '\n== %s\n' "$*"; }

say "the operator and what is asked for beforehand"
kubectl get crd rayclusters.ray.io -o jsonpath='{.spec.versions[?(@.served==true)].name}{"\n"}'
[[ $(kubectl get crd rayclusters.ray.io -o yaml) == *authOptions* ]] || { echo "KubeRay is older than 1.6" >&2; exit 1; }
kubectl apply -f namespace.yaml
k get secret shoal-keys -o name
k get pvc shoal-models -o name

say "apply, judged by the API server first"
kubectl apply -k . --dry-run=server
kubectl apply -k .

say "the head"
k wait raycluster/shoal --for=condition=HeadPodReady --timeout="${wait_s}s"

say "front doors that can place a request (not before the model is loaded)"
k wait pod -l ray.io/cluster=shoal,ray.io/group=ingress --for=condition=Ready --timeout="${wait_s}s" ||
  { k logs job/shoal-serve --tail=50; exit 1; }
k get pods -o wide

say "a chat through the service"
k port-forward service/shoal 18000:80 >/dev/null &
forward=$!
trap 'kill "$forward" 2>/dev/null || true' EXIT
curl -sf --retry 30 --retry-delay 1 --retry-connrefused localhost:18000/health
ask() {
  curl -sS --fail-with-body --max-time 120 "localhost:18000/v1/$1" -H "authorization: Bearer $SHOAL_API_KEY" "${@:2}"
}
model=$(ask models | grep -o '"id": *"[^"]*"' | sed -n '1s/.*"\(.*\)"/\1/p')
body='{"model": "'"$model"'", "messages": [{"role": "user", "content": "Count to fifty."}], "temperature": 0'
ask chat/completions -H 'content-type: application/json' -d "$body, \"max_tokens\": 32}"
[ "$(curl -s -o /dev/null -w '%{http_code}' localhost:18000/v1/models)" = 401 ] || { echo "no key was needed" >&2; exit 1; }

say "a stream while an engine's pod is deleted"
ask chat/completions -H 'content-type: application/json' -N -d "$body, \"max_tokens\": 400, \"stream\": true}" >stream.log &
stream=$!
sleep 2
k delete "$(k get pod -l ray.io/cluster=shoal,ray.io/group=engine -o name | sed -n 1p)" --wait=false
wait "$stream"
[[ $(tail -c 100 stream.log) == *'data: [DONE]'* ]] || { echo "the stream was cut" >&2; exit 1; }
rm stream.log

say "what is left to look at: kubectl -n $namespace port-forward service/shoal-head-svc 8265"
if [ "${1:-}" = --delete ]; then
  kubectl delete -k .
fi
say "passed"
