"""Server-sent events, as bytes."""

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
