import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from shoal.actors.ingress.protocol import ChatMessage
from shoal.actors.ingress.text import PromptError, TextCodec
from tests.ingress.checkpoints import (
    CHAT_TEMPLATE,
    adding_bos,
    byte_level_tokenizer,
    metaspace_tokenizer,
    save_checkpoint,
)

BOS, EOS = 0, 1
WITHOUT_BOS = CHAT_TEMPLATE.replace("{{ bos_token }}", "")


def codec(
    folder: Path, *, adds_bos: bool = False, has_bos: bool = True, chat_template: str | None = CHAT_TEMPLATE
) -> TextCodec:
    tokenizer = byte_level_tokenizer()
    if adds_bos:
        adding_bos(tokenizer)
    bos_token = "<s>" if has_bos else None
    save_checkpoint(folder, tokenizer, bos_token=bos_token, chat_template=chat_template)
    return TextCodec.load(folder)


def chat(codec: TextCodec, *messages: tuple[str, str]) -> tuple[int, ...]:
    conversation = [ChatMessage.model_validate({"role": r, "content": c}) for r, c in messages]
    return codec.encode_chat(codec.render_chat(conversation))


def prompt(codec: TextCodec, text: str) -> tuple[int, ...]:
    return codec.encode_prompt(text)


def decoded(token_ids: Sequence[int]) -> str:
    return byte_level_tokenizer().decode(list(token_ids), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("adds_bos", "template", "num_bos"),
    [
        (True, CHAT_TEMPLATE, 1),
        (True, WITHOUT_BOS, 1),
        (False, CHAT_TEMPLATE, 1),
        (False, WITHOUT_BOS, 0),
    ],
)
def test_a_chat_begins_with_one_bos_if_the_model_uses_any(
    tmp_path: Path, adds_bos: bool, template: str, num_bos: int
) -> None:
    token_ids = chat(codec(tmp_path, adds_bos=adds_bos, chat_template=template), ("user", "Hello world"))
    assert decoded(token_ids) == (
        "<s>" * num_bos + "<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant"
    )


@pytest.mark.parametrize("text", ["the fox", "<s>the fox"])
def test_a_prompt_begins_with_one_bos_even_if_its_text_does(tmp_path: Path, text: str) -> None:
    assert decoded(prompt(codec(tmp_path, adds_bos=True), text)) == "<s>the fox"


def test_a_tokenizer_that_adds_nothing_leaves_a_prompt_as_it_is(tmp_path: Path) -> None:
    assert decoded(prompt(codec(tmp_path), "<s><s>the")) == "<s><s>the"
    assert decoded(prompt(codec(tmp_path), "the")) == "the"


def test_case_72_an_empty_prompt_is_bos_or_refused(tmp_path: Path) -> None:
    assert prompt(codec(tmp_path / "adds", adds_bos=True), "") == (BOS,)
    assert prompt(codec(tmp_path / "has"), "") == (BOS,)
    with pytest.raises(PromptError, match="empty"):
        prompt(codec(tmp_path / "none", has_bos=False), "")


def test_a_template_tells_the_client_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="Conversation roles must alternate"):
        chat(codec(tmp_path), ("user", "one"), ("user", "two"))


def test_a_template_that_breaks_refuses_too(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot render"):
        chat(codec(tmp_path, chat_template="{{ 1 + messages[0].content }}"), ("user", "one"))


def test_a_model_without_a_template_does_not_chat(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        chat(codec(tmp_path, chat_template=None), ("user", "Hello"))


def test_developers_are_the_system_to_a_template_that_does_not_know_them(tmp_path: Path) -> None:
    assert "<|im_start|>system\nbe brief" in decoded(chat(codec(tmp_path), ("developer", "be brief")))


def test_an_unnamed_sender_has_no_name_in_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ 'name' in m }}{% endfor %}"
    assert decoded(chat(codec(tmp_path, chat_template=template), ("user", "Hello"))) == "False"


def test_end_tokens_are_gathered_from_every_place(tmp_path: Path) -> None:
    configs = {"generation_config.json": {"eos_token_id": [2, 3]}, "config.json": {"eos_token_id": 7}}
    folder = save_checkpoint(tmp_path, byte_level_tokenizer(), configs=configs)
    assert TextCodec.load(folder).stop_token_ids == {EOS, 2, 3, 7}


def test_a_slow_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no tokenizer\.json: only fast tokenizers"):
        TextCodec.load(tmp_path)


def test_truncation_left_over_from_training_is_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    token_ids = prompt(TextCodec.load(save_checkpoint(tmp_path, tokenizer)), "alpha beta gamma")
    assert decoded(token_ids) == "alpha beta gamma"


def test_the_front_door_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, byte_level_tokenizer())
    program = (
        "import json, sys, shoal.actors.ingress.app;"
        "from shoal.actors.ingress.text import ChatMessage, TextCodec;"
        f"codec = TextCodec.load({str(folder)!r});"
        "codec.encode_chat(codec.render_chat([ChatMessage(role='user', content='Hi')]));"
        "print(json.dumps(sorted({'torch', 'ray'} & sys.modules.keys())))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment)
    assert json.loads(printed) == []


def test_a_text_counts_as_at_least_as_many_tokens_as_its_longest_token_fits_in(tmp_path: Path) -> None:
    text_codec = codec(tmp_path)
    longest = len("<|im_start|>")
    assert text_codec.fewest_tokens("") == 0
    assert text_codec.fewest_tokens("é" * longest) == 2
    assert text_codec.fewest_tokens("é" * longest + "a") == 3


def bare(tokenizer: Tokenizer) -> TextCodec:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    return TextCodec(fast, stop_token_ids=frozenset(), num_token_ids=None)


BARE = [bare(byte_level_tokenizer()), bare(metaspace_tokenizer())]


@given(st.text() | st.text(alphabet="the fox<|im_end|>"))
def test_a_text_never_has_fewer_tokens_than_it_counts_as(text: str) -> None:
    for text_codec in BARE:
        assert text_codec.fewest_tokens(text) <= len(text_codec.encode_plainly(text, False))


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC()], ids=str)
def test_a_normalizer_may_make_a_text_shorter(normalizer: normalizers.Normalizer) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizer
    text_codec = bare(tokenizer)
    kelvins = "\u212a" * 1000  # three bytes each, "K" for the tokenizer
    assert text_codec.fewest_tokens(kelvins) <= len(text_codec.encode_plainly(kelvins, False)) == 1000
