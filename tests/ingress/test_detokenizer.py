from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from shoal.actors.ingress.detokenizer import Detokenizer, TokenBytes, written_text
from tests.ingress.checkpoints import byte_level_tokenizer, metaspace_tokenizer, token_id

BYTE_LEVEL = byte_level_tokenizer()
METASPACE = metaspace_tokenizer()
TABLES = {id(tokenizer): TokenBytes(tokenizer) for tokenizer in (BYTE_LEVEL, METASPACE)}
PROMPT = "the fox"

any_text = st.text(max_size=40)
words = st.text(alphabet="the foxé日😀 \n", max_size=40)


def pieces(tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(TABLES[id(tokenizer)], prompt_ids)
    return [detokenizer.push(one) for one in token_ids]


def byte_tokens(*values: int) -> list[int]:
    return [token_id(METASPACE, f"<0x{value:02X}>") for value in values]


def test_half_a_character_waits_for_its_other_half() -> None:
    assert pieces(METASPACE, [0], byte_tokens(0xF0, 0x9F, 0x98, 0x80)) == ["", "", "", "😀"]


def test_an_incomplete_character_at_the_end_is_never_shown() -> None:
    assert "".join(pieces(METASPACE, [0], byte_tokens(0x41, 0xF0, 0x9F))) == "A"


def test_valid_characters_survive_an_invalid_byte_behind_them() -> None:
    # The library itself turns the whole run into U+FFFD, which cannot be known when the first are shown.
    assert "".join(pieces(METASPACE, [0], byte_tokens(0xC3, 0xA9, 0xFF, 0x78))) == "é\ufffdx"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte level", "metaspace"])
def test_invalid_bytes_for_ever_are_not_held_back(tokenizer: Tokenizer) -> None:
    continuation = {id(BYTE_LEVEL): "Ģ", id(METASPACE): "<0x80>"}[id(tokenizer)]
    shown = pieces(tokenizer, [0], [token_id(tokenizer, continuation)] * 1000)
    assert shown == ["\ufffd"] * 1000


def test_a_space_is_dropped_only_where_the_text_begins() -> None:
    bos, the = token_id(METASPACE, "<s>"), token_id(METASPACE, "▁the▁")
    prompt_ids = METASPACE.encode(PROMPT).ids
    assert pieces(METASPACE, [bos], [the, the]) == ["the ", " the "]
    assert pieces(METASPACE, [bos, *prompt_ids], [the, the]) == [" the ", " the "]


def test_special_and_unknown_tokens_have_no_text() -> None:
    end, beyond = token_id(BYTE_LEVEL, "<|im_end|>"), BYTE_LEVEL.get_vocab_size() + 7
    assert pieces(BYTE_LEVEL, [0], [end, beyond, token_id(BYTE_LEVEL, "t")]) == ["", "", "t"]


def test_an_added_token_that_is_not_special_is_shown_as_written() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<think> ☃"])
    detokenizer = Detokenizer(TokenBytes(tokenizer), [0])
    assert detokenizer.push(token_id(tokenizer, "<think> ☃")) == "<think> ☃"


@pytest.mark.parametrize(
    ("decoder", "shown"),
    [
        (None, ["▁one", " ##two", " ▁one"]),
        (decoders.Metaspace(), ["one", "##two", " one"]),
        (decoders.WordPiece(), ["▁one", "two", " ▁one"]),
    ],
    ids=str,
)
def test_other_decoders_are_asked_themselves(decoder: decoders.Decoder | None, shown: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "##two": 1}))
    if decoder is not None:
        tokenizer.decoder = decoder
    detokenizer = Detokenizer(TokenBytes(tokenizer), [])
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.push(0)] == shown
    assert tokenizer.decode([0, 1, 0]) == "".join(shown)


@given(any_text | words)
def test_a_byte_level_stream_gives_back_any_text(text: str) -> None:
    assert "".join(pieces(BYTE_LEVEL, [0], BYTE_LEVEL.encode(text).ids)) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40))
def test_a_byte_level_stream_says_of_any_tokens_what_the_library_says(token_ids: list[int]) -> None:
    ended = [*token_ids, token_id(BYTE_LEVEL, "t")]  # so that no character is left incomplete
    assert "".join(pieces(BYTE_LEVEL, [0], ended)) == BYTE_LEVEL.decode(ended)


@given(any_text | words)
def test_a_metaspace_stream_continues_its_prompt_with_any_text(text: str) -> None:
    prompt_ids, token_ids = METASPACE.encode(PROMPT).ids, METASPACE.encode(text).ids
    shown = "".join(pieces(METASPACE, prompt_ids, token_ids))
    assert METASPACE.decode(prompt_ids) + shown == METASPACE.decode(prompt_ids + token_ids)


@given(st.lists(st.integers(0, token_id(METASPACE, "<0x00>") - 1), min_size=1, max_size=40))
def test_a_metaspace_stream_begins_its_text_with_any_tokens(token_ids: list[int]) -> None:
    assert "".join(pieces(METASPACE, [1], token_ids)) == METASPACE.decode(token_ids)


def byte_level_ids(data: bytes) -> list[int]:
    """A token for each byte."""
    by_byte = {TABLES[id(BYTE_LEVEL)].piece(one): one for one in range(BYTE_LEVEL.get_vocab_size())}
    return [by_byte[bytes([byte])] for byte in data]


@given(st.text(alphabet="aé日😀", max_size=6).map(str.encode) | st.binary(max_size=12), st.integers(0, 12))
def test_a_character_that_the_prompt_begins_is_not_lost(data: bytes, cut: int) -> None:
    prompt_ids, token_ids = byte_level_ids(data[:cut]), byte_level_ids(data[cut:] + b"t")
    shown = "".join(pieces(BYTE_LEVEL, prompt_ids, token_ids))
    prompt = written_text(TABLES[id(BYTE_LEVEL)], prompt_ids, goes_on=True)
    assert prompt + shown == (data + b"t").decode(errors="replace")


def test_a_special_token_ends_a_character_that_was_begun() -> None:
    half, end = byte_level_ids(b"\xe6\x97"), token_id(BYTE_LEVEL, "<|im_end|>")
    assert pieces(BYTE_LEVEL, [*half, end], byte_level_ids(b"t")) == ["t"]
