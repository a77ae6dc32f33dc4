"""The front door under an OpenAPI fuzzer: whatever is sent, nothing is our failure.

`python -m tests.api.fuzz --seconds 600` needs `pip install -e '.[dev,fuzz]'`. It serves a tiny tokenizer over
scripted engines, with keys, and lets schemathesis send what the schema allows and what it does not.
"""

import argparse
import logging
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.keys import KeyEntry, KeyRing, hash_of, new_key
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ModelCard
from tests.api.fakes import FakeDispatcher, Script, serving_one
from tests.api.server import serving
from tests.ingress.checkpoints import adding_bos, byte_level_tokenizer, save_checkpoint, tokens_of

CLOSING_S = 60
"""For what schemathesis does beside sending."""


@contextmanager
def served(key: str) -> Iterator[str]:
    """The URL; the key is a client's and the admin's, so that everything is reached."""
    with TemporaryDirectory(prefix="shoal-fuzz-") as folder:
        checkpoint = str(save_checkpoint(Path(folder), adding_bos(byte_level_tokenizer())))
        card = ModelCard(
            name="tiny", checkpoint=checkpoint, max_model_len=512, block_size=16, fingerprint=b"tiny"
        )
        dispatcher = FakeDispatcher()
        dispatcher.script = Script(token_ids=tokens_of("alpha"))
        entry = KeyEntry(name="fuzzer", hash=hash_of(key), tokens_per_minute=2**50)
        guard = Guard(
            time.monotonic, keys=KeyRing(time.monotonic, always=[entry]), admin_key_hash=hash_of(key)
        )
        models = serving_one(card, TextCodec.load(checkpoint), dispatcher)
        app = create_app(models=models, guard=guard)
        for schema in app.openapi()["components"]["schemas"].values():
            # Whoever allows no time at all gets the 504 that he has asked for.
            schema.get("properties", {}).pop("timeout", None)
        with serving(app) as url:
            yield url


def fuzz(url: str, key: str, seconds: int, seed: int | None) -> int:
    """schemathesis' exit status: not 0 if an answer was a 5xx."""
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or "schemathesis"
    command = [program, "run", f"{url}/openapi.json", "--max-time", str(seconds)]
    command += [
        "--phases",
        "coverage,fuzzing",
        "--include-method",
        "POST",
    ]  # bodies are what there is to get wrong
    command += ["-H", f"Authorization: Bearer {key}", "--checks", "not_a_server_error", "--warnings", "off"]
    command += [] if seed is None else ["--seed", str(seed)]
    with TemporaryDirectory(prefix="shoal-fuzz-") as folder:  # it leaves its own behind
        return subprocess.run(command, timeout=seconds + CLOSING_S, check=False, cwd=folder).returncode


def statuses(url: str) -> Counter[str]:
    """Of all that was asked, by our own count."""
    counted: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("shoal_http_requests_total{"):
            name, value = line.rsplit(" ", 1)
            counted[name.split('status="')[1][:3]] += int(float(value))
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # of fields that nobody knows, which is most of them
    key = new_key()
    with served(key) as url:
        status = fuzz(url, key, arguments.seconds, arguments.seed)
        counted = statuses(url)
    print("answers by status:", dict(sorted(counted.items())))
    failures = {status: count for status, count in counted.items() if status >= "500"}
    return status or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
