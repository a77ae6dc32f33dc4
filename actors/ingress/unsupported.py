"""Fields that would change the answer and are not served: refused by name rather than ignored.

A client that asks for two answers, a tool or a schema and silently gets something else finds out much later.
"""

from collections.abc import Mapping
from typing import Any

from shoal.actors.ingress.errors import bad_request

IN_A_REQUEST: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "prompt_logprobs": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tools": ([],),
    "top_logprobs": (),
}
"""Field → the values, beside null, that ask for nothing special."""

IN_A_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    _refuse(body, IN_A_REQUEST, prefix="")
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse(message, IN_A_MESSAGE, prefix=f"messages[{index}].")


def _refuse(fields: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]], *, prefix: str) -> None:
    for name, values in harmless.items():
        value = fields.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in values):
            param = prefix + name
            raise bad_request(f"{param}: this value is not supported.", param=param, code="unsupported")


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and value == allowed  # True is not 1 here
