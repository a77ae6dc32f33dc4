"""A real HTTP server on a thread of its own, as a client meets it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from shoal.actors.ingress.actor import listen
from shoal.actors.messages import HttpConfig


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The server's address, while it serves."""
    listener = listen(HttpConfig(port=0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    thread.start()
    try:
        # Connections wait in the listener's backlog until the server is up.
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
