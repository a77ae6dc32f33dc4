"""A session as a client speaks it: every turn sends the history again, the server's real replies included."""

from typing import Any, Literal

from shoal.cluster.bench.serve.workload import Passage, Session, Turn

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}


class Dialogue:
    """`ask` a turn, `hear` its reply, `ask` the next. What was sent once is a prefix of what is sent next."""

    def __init__(self, session: Session, endpoint: Endpoint) -> None:
        self._chat = endpoint == "chat"
        self._messages: list[dict[str, Any]] = []
        self._prompt: Passage = session.prefix
        if session.prefix:
            self._messages.append({"role": "system", "content": session.prefix})

    def ask(self, turn: Turn) -> dict[str, Any]:
        """The fields of a request that hold the prompt and how much is to be said."""
        if self._chat:
            self._messages.append({"role": "user", "content": turn.passage})
            return {"messages": list(self._messages), "max_tokens": turn.output_len}
        self._prompt = _joined(self._prompt, turn.passage)
        return {"prompt": self._prompt, "max_tokens": turn.output_len}

    def hear(self, reply: str) -> None:
        if self._chat:
            self._messages.append({"role": "assistant", "content": reply})
        elif isinstance(self._prompt, str):
            self._prompt += reply


def _joined(before: Passage, passage: Passage) -> Passage:
    if isinstance(before, str) and isinstance(passage, str):
        return f"{before}\n{passage}" if before else passage
    return (*before, *passage)
