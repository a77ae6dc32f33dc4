"""Ray's control store is killed and comes back under streams, with what it had written to disk.

    python -m tests.cluster.gcs_restart

Every stream must tell what it tells in peace, and nobody may be replaced.
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from tests.checkpoints import tiny_llama
from tests.cluster.served import Served, private_ray, wait_for
from tests.cluster.streamed import Body, Said, bodies, spoken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--away", type=float, default=5.0, help="seconds without it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=f"{folder}/gcs")
        with private_ray() as address:
            checkpoint = tiny_llama(Path(folder), max_position_embeddings=4096)
            with Served.start(checkpoint, address, engines=2) as served:
                served.wait_until_ready()
                return _run(served, args)


def _run(served: Served, args: argparse.Namespace) -> int:
    node: Any = ray._private.worker._global_node
    asked = bodies(served.url, args.streams, max_tokens=400)
    alone = [spoken(served.url, body) for body in asked]
    before = served.names()
    until = time.monotonic() + args.away + 5.0
    with ThreadPoolExecutor(len(asked)) as pool:
        streams = [pool.submit(_again_and_again, served.url, body, until) for body in asked]
        wait_for(lambda: served.num_requests() >= args.streams // 2, "streams are open")
        node.kill_gcs_server()
        print("killed", flush=True)
        time.sleep(args.away)
        node.start_gcs_server()
        print("started again", flush=True)
        said = [stream.result(timeout=180) for stream in streams]
    wrong = [one for each, expected in zip(said, alone, strict=True) for one in each if one != expected]
    wait_for(served.ready_engines, "the supervisor knows all again")
    replaced = before ^ served.names()
    print(
        f"{sum(map(len, said))} streams, {len(wrong)} told something else; replaced: {replaced or 'nobody'}"
    )
    return 1 if wrong or replaced or served.stop() or served.names() else 0


def _again_and_again(url: str, body: Body, until: float) -> list[Said]:
    said = [spoken(url, body)]
    while time.monotonic() < until:
        said.append(spoken(url, body))
    return said


if __name__ == "__main__":
    sys.exit(main())
