import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from app.detokenize import TextStream


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte: every character beyond ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def pieces(tokenizer: Tokenizer, text: str, *stop: str) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer, stop)
    out = [stream.push(token_id) for token_id in tokenizer.encode(text).ids]
    return [*out, stream.finish()], stream.stopped


def test_characters_are_never_split(tokenizer: Tokenizer) -> None:
    out, _ = pieces(tokenizer, "né 🐈 日本")
    assert "".join(out) == "né 🐈 日本"
    assert not any("\ufffd" in piece for piece in out)


def test_an_answer_cut_inside_a_character_leaves_it_out(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    text = "".join(stream.push(i) for i in tokenizer.encode("a🐈").ids[:3]) + stream.finish()
    assert text == "a"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["xyz"], "one two three"),
        ("ababac", ["abac"], "ab"),
        ("one two", ["two", "one"], ""),
        ("caf", ["café"], "caf"),
        ("x café", ["é"], "x caf"),
    ],
)
def test_stop_strings_across_token_borders(
    tokenizer: Tokenizer, text: str, stop: list[str], expected: str
) -> None:
    out, stopped = pieces(tokenizer, text, *stop)
    assert "".join(out) == expected
    assert stopped == (expected != text)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back(tokenizer: Tokenizer) -> None:
    out, _ = pieces(tokenizer, "ab", "zz")
    assert out[:2] == ["a", "b"]


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, "a<|end|>b")[0]) == "ab"
