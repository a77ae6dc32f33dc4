"""A cluster beside other servers over HTTP, same weights, same load: `python -m tests.bench.peers_http`.

16 streams whose prompts share prefixes of 1,024 tokens. Two engines of one thread stand behind our router;
llama-server has two threads and a slot for each stream, vLLM's server two threads. All are up at the same
time; `shoal bench serve` loads them in turns with prompts that none has seen; whoever is not asked is idle.

    python -m tests.bench.peers_http --vs llama.cpp                              # llama-server on PATH
    python -m tests.bench.peers_http --vs llama.cpp --vs vllm --peer-python V/bin/python --json peers.json
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shoal.cluster.bench.contender import PeerError, PeerName
from shoal.cluster.bench.gguf_weights import cached_gguf
from shoal.cluster.bench.llama_cpp_peer import find_program
from shoal.cluster.bench.server_process import free_port, running
from shoal.cluster.bench.vllm_peer import check_vllm, environment
from tests.bench.front_door import bench_serve
from tests.checkpoints import smollm2
from tests.cluster.served import Served, private_ray, wait_for

MODEL_LEN, MEMORY_GIB = 2048, 4
START_DEADLINE_S = 1200.0
"""vLLM compiles the model when it first starts."""
Command = tuple[list[str], Mapping[str, str]]


def llama_server(checkpoint: Path, port: int, args: argparse.Namespace) -> Command:
    command = [str(find_program("llama-server")), "--model", str(cached_gguf(checkpoint, "float16"))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--parallel", str(args.streams)]
    command += ["--ctx-size", str(args.streams * MODEL_LEN)]
    return [*command, "--threads", str(args.threads), "--threads-batch", str(args.threads)], os.environ


def vllm_server(checkpoint: Path, port: int, args: argparse.Namespace) -> Command:
    python = check_vllm(args.peer_python)
    command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MODEL_LEN)]
    command += ["--max-num-seqs", str(args.streams), "--enable-prompt-tokens-details"]
    # Left to itself it would keep one of two cores for its server, and bind the other.
    threads = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return command, environment(python, os.environ) | threads | {"VLLM_CPU_KVCACHE_SPACE": str(MEMORY_GIB)}


SERVERS = {PeerName.LLAMA_CPP: llama_server, PeerName.VLLM: vllm_server}


@contextmanager
def our_cluster(checkpoint: Path, args: argparse.Namespace) -> Iterator[str]:
    with private_ray(object_store_bytes=None) as address:
        # Only now: ray.init takes SIGTERM for itself, and would end us without ending the servers.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        flags = {
            "--threads": args.threads // args.engines,
            "--memory": f"{MEMORY_GIB / args.engines}GiB",
            "--max-model-len": MODEL_LEN,
            "--max-num-seqs": args.streams,
            "--block-size": 128,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        with Served.start(checkpoint, address, *words, engines=args.engines) as served:
            served.wait_until_ready()
            wait_for(
                lambda: len(served.engine_names()) == args.engines,
                "all engines",
                within_s=START_DEADLINE_S,
            )
            yield served.url


def load(url: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One turn: what `shoal bench serve` says of it."""
    flags = {
        "--endpoint": "completions",
        "--workload": "shared-prefix",
        "--groups": args.groups,
        "--prefix-len": args.prefix_len,
        "--input-len": args.input_len,
        "--output-len": args.output_len,
        "--concurrency": args.streams,
        "--num-requests": args.requests,
        "--seed": seed,
    }
    summary = bench_serve(url, *(str(word) for flag in flags.items() for word in flag))
    if summary["failed"]:
        sys.exit(f"{url}: {summary['failures']}")
    return {
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "itl_p50_s": summary["itl_s"]["p50"],
        **{count: summary[count] for count in ("input_tokens", "cached_tokens", "output_tokens")},
    }


def measure(urls: Mapping[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for turn in range(args.rounds + 1):
        for server, url in urls.items():
            row = {"server": server, "round": turn, **load(url, 1000 + turn, args)}
            if turn == 0:
                continue  # all are warm now
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ours over each peer's output tokens/s, the best turn of each."""
    best: dict[str, float] = {}
    for row in rows:
        best[row["server"]] = max(best.get(row["server"], 0.0), row["output_tokens_per_s"])
    return {server: round(best["shoal"] / speed, 2) for server, speed in best.items() if server != "shoal"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name.value for name in SERVERS]
    parser.add_argument("--vs", action="append", choices=names, required=True)
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment that has vLLM")
    parser.add_argument("--json", type=Path)
    for name, default in {
        "rounds": 3,
        "streams": 16,
        "requests": 48,
        "groups": 4,
        "prefix-len": 1024,
        "input-len": 64,
        "output-len": 64,
        "engines": 2,
        "threads": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    checkpoint = smollm2()
    try:
        with ExitStack() as stack:
            servers = []
            for name in map(PeerName, dict.fromkeys(args.vs)):  # all are known before one is started
                port = free_port()
                servers.append(
                    (name.value, f"http://127.0.0.1:{port}", SERVERS[name](checkpoint, port, args))
                )
            urls = {"shoal": stack.enter_context(our_cluster(checkpoint, args))}
            for peer, url, (command, env) in servers:
                server = running(peer, command, url, env=env, within_s=START_DEADLINE_S)
                urls[peer] = stack.enter_context(server)
            rows = measure(urls, args)
    except PeerError as error:
        sys.exit(f"error: {error}")
    result = {"rows": rows, "ratios": ratios(rows)}
    print(json.dumps(result["ratios"]))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
