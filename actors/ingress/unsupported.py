"""Fields that an endpoint does not serve: refused by name where ignoring them would change the answer.

A client that asks for a tool or a schema and silently gets something else finds out much later.
Of other fields that nobody here has heard of the client is told that they were ignored.
"""

from collections.abc import Collection, Mapping
from typing import Any

from shoal.actors.ingress.errors import bad_request

IN_A_REQUEST: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "max_completion_tokens": (),
    "modalities": (["text"],),
    "n": (1,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Field → the values, beside null, that ask for nothing special. Who serves a field judges it himself."""

IN_A_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}

WITHOUT_EFFECT = frozenset(
    {
        "function_call",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "tool_choice",
        "user",
    }
)
"""Known, and without meaning where nothing is stored, billed or called."""


def refuse_unsupported(body: Mapping[str, Any], served: Collection[str]) -> None:
    """Raises ApiError for a field that is not `served` and would change the answer."""
    _refuse({name: body[name] for name in body.keys() - served}, IN_A_REQUEST, prefix="")
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse(message, IN_A_MESSAGE, prefix=f"messages[{index}].")


def unknown_fields(body: Mapping[str, Any], served: Collection[str]) -> tuple[str, ...]:
    """Those that were sent and have no effect here, though their sender may think so."""
    return tuple(sorted(body.keys() - served - IN_A_REQUEST.keys() - WITHOUT_EFFECT))


def _refuse(fields: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]], *, prefix: str) -> None:
    for name, values in harmless.items():
        value = fields.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in values):
            param = prefix + name
            raise bad_request(f"{param}: this value is not supported.", param=param, code="unsupported")


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and value == allowed  # True is not 1 here
