"""From tokens to text, one token at a time: whole characters only, the same text however the tokens arrive.

Decoding a growing window of tokens again and again (as `DecodeStream` of the tokenizers library does) fails
on what an untrained or badly steered model says: it raises when a later byte changes earlier text, and it
holds a run of invalid bytes back for ever, at quadratic cost. Here a token is its bytes, looked up in a
table, and an incremental UTF-8 decoder joins them: at most three bytes ever wait.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
MAX_INCOMPLETE_BYTES = 3
"""Of a character's four."""
_ANCHOR = "a"
"""Any ordinary token: decoders trim the first one of a text, so a token's own text is read behind another."""


class TokenBytes:
    """The bytes that each token adds to a text: none for special tokens and IDs outside the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._pieces: dict[int, bytes] = {}

    def is_visible(self, token_id: int) -> bool:
        return token_id not in self._special and self._tokenizer.id_to_token(token_id) is not None

    def piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._decode(token_id, context=[_ANCHOR])
        return piece

    def longest(self) -> int:
        """Bytes of the longest token as it is written."""
        return max(map(len, map(self._written_bytes, self._tokenizer.get_vocab())), default=1)

    def _written_bytes(self, token: str) -> bytes:
        return token.encode() if self._byte_level is None else _byte_level_bytes(token, self._byte_level)

    def written(self, token_id: int) -> bytes:
        """The token by itself, for people: special ones as they are written, unknown ones by their number."""
        if token_id in self._special:
            return str(self._tokenizer.id_to_token(token_id)).encode()
        return self.piece(token_id) if self.is_visible(token_id) else f"token_id:{token_id}".encode()

    def leading_piece(self, token_id: int) -> bytes:
        """The same for a token that begins a text, where sentencepiece drops a space."""
        return self._decode(token_id, context=[])

    def _decode(self, token_id: int, context: list[str]) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        if self._byte_level is not None:
            return _byte_level_bytes(token, self._byte_level)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self._join([*context, token]).removeprefix(self._join(context)).encode()

    def _join(self, tokens: list[str]) -> str:
        decoder = self._tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)


class Detokenizer:
    """One stream's text. An incomplete character at the very end is never shown; one that the prompt began
    is the stream's as soon as it is complete."""

    def __init__(self, table: TokenBytes, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._utf8 = _incremental_utf8()
        self._utf8.decode(_incomplete_end(table, prompt_token_ids))
        self._begins_the_text = not any(map(table.is_visible, prompt_token_ids))

    def push(self, token_id: int) -> str:
        if self._begins_the_text and self._table.is_visible(token_id):
            self._begins_the_text = False
            return self._utf8.decode(self._table.leading_piece(token_id))
        return self._utf8.decode(self._table.piece(token_id))


def _incremental_utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _incomplete_end(table: TokenBytes, token_ids: Sequence[int]) -> bytes:
    """What a text leaves of a character that it begins and does not complete: at most three bytes."""
    end = b""
    for token_id in reversed(token_ids):
        if len(end) >= MAX_INCOMPLETE_BYTES or not table.is_visible(token_id):
            break
        end = table.piece(token_id) + end
    utf8 = _incremental_utf8()
    utf8.decode(end[-MAX_INCOMPLETE_BYTES:])
    return utf8.getstate()[0]


def written_text(table: TokenBytes, token_ids: Iterable[int], *, goes_on: bool = False) -> str:
    """What these tokens were made from, special ones included, as far as the tokenizer can be reversed.

    If the text goes on, a character that is incomplete at its end belongs to what follows.
    """
    pieces = []
    begins_the_text = True
    for token_id in token_ids:
        if begins_the_text and table.is_visible(token_id):
            begins_the_text = False
            pieces.append(table.leading_piece(token_id))
        else:
            pieces.append(table.written(token_id))
    return _incremental_utf8().decode(b"".join(pieces), final=not goes_on)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The types in the decoder's pipeline, of which the library tells only through its serialized form."""
    if tokenizer.decoder is None:
        return set()
    spec: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {step["type"] for step in spec.get("decoders", [spec])}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: a printable byte stands for itself, the others are U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token is written in plain text
        return token.encode()
