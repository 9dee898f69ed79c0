import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from app.openai.detokenize import TextStream, logprob_entries
from deployments.types import TokenLogprob


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


def test_no_stop_string_before_min_tokens(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["ab"], min_tokens=3)
    assert "".join(stream.push(token_id) for token_id in tokenizer.encode("abcabd").ids) == "abc"
    assert stream.stopped


def test_logprobs_tell_the_bytes_of_a_part_of_a_character(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("aé").ids
    told = [TokenLogprob(-0.5, [(token_ids[0], -0.5)]) for _ in token_ids]
    entries = logprob_entries(tokenizer, token_ids, told)
    assert [entry["bytes"] for entry in entries] == [[97], [0xC3], [0xA9]]
    assert [entry["token"] for entry in entries] == ["a", "\ufffd", "\ufffd"]
    assert entries[1]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]


def test_logprobs_of_special_tokens_and_of_nothing(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    (entry,) = logprob_entries(tokenizer, [end], [TokenLogprob(float("-inf"), [(10**6, -1.0)])])
    assert (entry["token"], entry["logprob"]) == ("<|end|>", -9999.0)
    assert entry["top_logprobs"] == [{"token": "", "logprob": -1.0, "bytes": []}]


def test_logprobs_of_byte_fallback() -> None:
    tokenizer = Tokenizer(models.BPE({"<0xC3>": 0, "x": 1}, []))
    (entry,) = logprob_entries(tokenizer, [0], [TokenLogprob(-1.0, [])])
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xC3])
