"""What is wrong with an input, as far as Shoal's own door would say before it asks an engine."""

from collections.abc import Callable
from pathlib import Path

from pydantic_core import to_json
from rich.console import Console

from shoal.actors.ingress.body import parse_body
from shoal.actors.ingress.errors import ApiError
from shoal.actors.ingress.protocol import ChatCompletionRequest, CompletionRequest, ModelRequest
from shoal.cluster.batch.lines import URLS, Line, Problem, Question, duplicate
from shoal.cluster.batch.run import read

MODELS: dict[str, type[ModelRequest]] = dict(
    zip(URLS, (ChatCompletionRequest, CompletionRequest), strict=True)
)


def check(path: Path, console: Console, found: Callable[[int, Problem], object]) -> int:
    """Tells what it finds, first what lines say and then what two of them say alike; the number of lines."""

    def look(number: int, line: Line) -> None:
        content = line.content
        problem = body_problem(content) if isinstance(content, Question) else content
        if problem is not None:
            found(number, problem)

    with read(path, console, on_line=look) as index:
        for number, first in index.duplicates():
            content = duplicate(first).content
            assert isinstance(content, Problem)
            found(number, content)
        return index.num_lines


def body_problem(question: Question) -> Problem | None:
    try:
        parse_body(to_json(question.body), MODELS[question.url])
    except ApiError as error:
        return Problem(code="invalid_body", message=f"body: {error}")
    return None
