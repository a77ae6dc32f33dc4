"""A real HTTP server on a thread of its own, as a client meets it."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from shoal.actors.ingress.actor import listen
from shoal.actors.ingress.connections import server_of
from shoal.actors.messages import HttpConfig


@contextmanager
def serving(app: FastAPI, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The server's address, while it serves."""
    listener = listen(HttpConfig(port=0))
    server = server_of(app, tls)
    server.config.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    thread.start()
    try:
        # Connections wait in the listener's backlog until the server is up.
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
