"""The lines of a batch, in OpenAI's form: one that asks, and the one that answers it."""

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 33 << 20
"""A server's door ends at a body of 32 MiB, and what is no batch may have no end of a line at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why there is no answer of a server."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    custom_id: str | None
    """None where it cannot be told."""
    content: Question | Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a server said, whatever it was."""

    status: int
    request_id: str
    body: dict[str, Any]


def read_line(data: bytes) -> Line:
    """Whatever the bytes are."""
    if len(data) > MAX_LINE_BYTES:
        return _unreadable("line_too_long", f"the line has more than {MAX_LINE_BYTES >> 20} MiB")
    try:
        line = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        return _unreadable("invalid_json_line", f"the line is not JSON: {error}")
    if not isinstance(line, dict):
        return _unreadable("invalid_json_line", "the line must be a JSON object")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return _unreadable("invalid_custom_id", "custom_id: it must be a text that is not empty")
    return Line(custom_id=custom_id, content=_content(line))


def _unreadable(code: str, message: str) -> Line:
    return Line(custom_id=None, content=Problem(code=code, message=message))


def _content(line: dict[str, Any]) -> Question | Problem:
    url, body = line.get("url"), line.get("body")
    if line.get("method") != "POST":
        return Problem(code="invalid_method", message='method: it must be "POST"')
    if url not in URLS:
        return Problem(code="invalid_url", message=f"url: it must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        return Problem(code="invalid_body", message="body: it must be an object")
    if body.get("stream"):
        return Problem(code="invalid_body", message="body.stream: a batch has no streams; leave it out")
    return Question(url=url, body=body)


def duplicate(first: int) -> Line:
    """Its custom_id has an answer already, or will have one: it is not written twice."""
    return _unreadable("duplicate_custom_id", f"custom_id: line {first} has the same")


def is_good(outcome: Reply | Problem) -> bool:
    return isinstance(outcome, Reply) and outcome.status == 200


def answer_line(answer_id: str, custom_id: str | None, outcome: Reply | Problem) -> bytes:
    """A server's refusal is a response too: `error` is for what never became one."""
    answer: dict[str, Any] = {"id": answer_id, "custom_id": custom_id, "response": None, "error": None}
    match outcome:
        case Reply(status=status, request_id=request_id, body=body):
            answer["response"] = {"status_code": status, "request_id": request_id, "body": body}
        case Problem(code=code, message=message):
            answer["error"] = {"code": code, "message": message}
    return to_json(answer) + b"\n"
