"""A conversation in the checkpoint's own terms: token ids, and the place of each item among them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from deployments.errors import InvalidRequest
from deployments.processor.checkpoint import Prompting
from deployments.types import Affixes, Chat, Modality, Prompt, TokenizerSpec


class ChatEncoder:
    """One tokenizer with its template, for one thread at a time.

    Control tokens that a user typed are text: they become neither control tokens nor placeholders. Embeddings
    in the place of text have a placeholder of our own, which no template knows: to it, it is a text.
    """

    def __init__(self, prompting: Prompting) -> None:
        tokenizer = prompting.tokenizer
        added = tokenizer.added_tokens_decoder
        self.spec = TokenizerSpec(
            tokenizer_json=tokenizer.backend_tokenizer.to_str(),
            special_token_ids=sorted(i for i, t in added.items() if t.special),
            max_token_length=max(map(len, tokenizer.get_vocab())),
            plain_token_id=next(i for i in range(len(tokenizer)) if i not in added),
        )
        tokenizer.add_tokens([_PROMPT], special_tokens=True)
        self._tokenizer = tokenizer
        self._template = prompting.chat_template
        self._modality_of: dict[int, Modality | None] = {
            tokenizer.convert_tokens_to_ids(token): modality
            for modality, token in prompting.placeholders.items()
        }
        self._placeholders = _placeholder_pattern(prompting)
        self._modality_of[tokenizer.convert_tokens_to_ids(_PROMPT)] = None
        self._control = _control_tokens(prompting)
        self._takes = {
            (role, form): self._renders(role, form) for role in _AROUND for form in (_as_string, _as_parts)
        }
        self._knows_developers = "developer" in self._template
        self._wrap = _special_token_frame(tokenizer) if prompting.add_special_tokens else ([], [])

    def encode(self, chat: Chat, affixes: Sequence[Affixes] = ()) -> Prompt:
        """`affixes`: of each item, in their order; none where all are empty."""
        items = _items(chat)
        token_ids = self._token_ids(chat, list(zip(items, affixes, strict=True)) if affixes else [])
        return Prompt(token_ids, self._find(items, token_ids))

    def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def decode(self, token_ids: list[int]) -> tuple[str, list[str]]:
        """The text, and each token as the vocabulary has it."""
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < len(self._tokenizer):
                raise InvalidRequest(
                    f"tokens[{index}] is {token_id}; the vocabulary has {len(self._tokenizer)} tokens.",
                    f"tokens[{index}]",
                )
        text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text, self._tokenizer.convert_ids_to_tokens(token_ids)

    def _token_ids(self, chat: Chat, affixes: Sequence[tuple[Modality | None, Affixes]]) -> list[int]:
        from transformers.utils.chat_template_utils import encode_marked_chat

        text = self._render(chat)
        if affixes:
            text = self._with_affixes(text, affixes)
        try:
            token_ids: list[int] = encode_marked_chat(self._tokenizer, text)
        except ValueError as error:
            # A vocabulary may hold a control token among its plain ones; then its name cannot be written.
            raise InvalidRequest(f"The tokenizer cannot take this text as text: {error}") from error
        if self._tokenizer.bos_token and text.startswith(self._tokenizer.bos_token):
            return token_ids
        before, after = self._wrap
        return before + token_ids + after

    def _render(self, chat: Chat) -> str:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import mark_control_tokens

        marked = mark_control_tokens(chat.messages, self._control)
        messages = [self.adapted(_with_places(message)) for message in marked]
        for message in messages:
            self._keep_apart(message.get("content") or "")
        try:
            return self._fill(messages, chat.add_generation_prompt)
        except TemplateError as error:
            raise InvalidRequest(f"The model's chat template refuses this conversation: {error}") from error
        except TypeError as error:
            # What a template for strings alone does with a list of parts.
            raise InvalidRequest("The model's chat template cannot render this conversation.") from error

    def _fill(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            **self._tokenizer.special_tokens_map,
        )
        return str(texts[0])

    def adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in a form that the template takes, where it does not take the client's."""
        role, content = message["role"], message.get("content")
        if role == "developer" and not self._knows_developers:
            role = "system"
        takes_string, takes_parts = (self._takes.get((role, form)) for form in (_as_string, _as_parts))
        if isinstance(content, str) and takes_parts and not takes_string:
            content = _as_parts([content])
        elif isinstance(content, list) and takes_string and not takes_parts and _is_text(content):
            content = _as_string([part["text"] for part in content])
        return {**message, "role": role, "content": content}

    def _renders(self, role: str, form: Callable[[list[str]], Any]) -> bool:
        """Whether content of this form comes out as its texts: some templates print a list as Python does."""
        from jinja2 import TemplateError

        messages = [
            {"role": each, "content": form(list(_PROBES) if each == role else ["other"])}
            for each in _AROUND[role]
        ]
        try:
            text = self._fill(messages, add_generation_prompt=False)
        except (TemplateError, TypeError):
            return False
        return all(probe in text for probe in _PROBES) and "'type'" not in text

    def _keep_apart(self, content: str | list[dict[str, Any]]) -> None:
        """A control token may not be put together from neighbouring texts, such as `<|im_` and `end|>`.

        A marker that closes nothing only keeps the text on either side from growing together.
        """
        from transformers.utils.chat_template_utils import _CONTROL_TOKEN_END

        if isinstance(content, str):
            return
        texts = [part for part in content if part["type"] == "text"]
        apart = sum(len(self._control.findall(part["text"])) for part in texts)
        if len(self._control.findall("".join(part["text"] for part in texts))) > apart:
            for part in texts:
                part["text"] = _CONTROL_TOKEN_END + part["text"]

    def _with_affixes(self, text: str, affixes: Sequence[tuple[Modality | None, Affixes]]) -> str:
        """The items' own text around their placeholders, to be encoded with what stands beside it."""
        left = {m: iter([edge for modality, edge in affixes if modality == m]) for m in Modality}

        def framed(match: re.Match[str]) -> str:
            head, tail = next(left[Modality(str(match.lastgroup))], ("", ""))
            return head + match.group() + tail

        return self._placeholders.sub(framed, text)

    def _find(self, items: list[Modality | None], token_ids: list[int]) -> list[tuple[Modality | None, int]]:
        """Each item's place in the prompt: the n-th image is the n-th image placeholder, and so on."""
        places: dict[Modality | None, list[int]] = {modality: [] for modality in (*Modality, None)}
        for index, token_id in enumerate(token_ids):
            if token_id in self._modality_of:
                places[self._modality_of[token_id]].append(index)
        for modality, count in Counter(items).items():
            if len(places[modality]) != count:
                raise InvalidRequest(
                    f"The request has {count} {modality or _EMBEDDED} item(s), but the model's chat template"
                    f" made {len(places[modality])} place(s) for them."
                )
        if len(items) != sum(map(len, places.values())):
            raise InvalidRequest("The model's chat template made places for media that were not sent.")
        iterators = {modality: iter(indices) for modality, indices in places.items()}
        return [(modality, next(iterators[modality])) for modality in items]


def _items(chat: Chat) -> list[Modality | None]:
    return [
        None if part["type"] == _EMBEDDED else Modality(part["type"])
        for message in chat.messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if part["type"] != "text"
    ]


_EMBEDDED = "prompt"  # type of a part that is embeddings in the place of text
_PROMPT = "<|headrace_prompt_embeds|>"


def _with_places(message: dict[str, Any]) -> dict[str, Any]:
    """The message with embedded text as a text part; what users typed has been marked before."""
    content = message.get("content")
    if isinstance(content, list):
        place = {"type": "text", "text": _PROMPT}
        content = [place if part["type"] == _EMBEDDED else part for part in content]
    return {**message, "content": content}


def _is_text(parts: list[dict[str, Any]]) -> bool:
    return all(part["type"] == "text" for part in parts)


def _as_string(texts: list[str]) -> str:
    return "\n".join(texts)


def _as_parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# A conversation that each role fits into, for templates that insist on turns.
_AROUND = {"system": ("system", "user"), "user": ("user",), "assistant": ("user", "assistant")}
_PROBES = ("probe one", "probe two")


def _placeholder_pattern(prompting: Prompting) -> re.Pattern[str]:
    """Matches the placeholders that the template wrote, not those that a user typed, which are marked."""
    from transformers.utils.chat_template_utils import _CONTROL_TOKEN_START

    tokens = [f"(?P<{m}>{re.escape(token)})" for m, token in prompting.placeholders.items()]
    return re.compile(f"(?<!{_CONTROL_TOKEN_START})(?:{'|'.join(tokens) or '(?!)'})")


def _control_tokens(prompting: Prompting) -> re.Pattern[str]:
    """Matches what a user may only mean as text: special tokens, and added ones that the template writes.

    The latter are made special here: HF can only encode special tokens as text.
    """
    from tokenizers import AddedToken

    tokenizer = prompting.tokenizer
    control = []
    for token in tokenizer.added_tokens_decoder.values():
        written = token.content in prompting.chat_template and not token.content.isspace()
        if token.special or written or token.content in prompting.placeholders.values():
            control.append(token)
    promoted = [
        AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=True,
        )
        for token in control
        if not token.special
    ]
    if promoted:
        tokenizer.add_tokens(promoted, special_tokens=True)
    longest_first = sorted((token.content for token in control), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _special_token_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer itself puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    framed = tokenizer.encode("a", add_special_tokens=True)
    start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    return framed[:start], framed[start + len(plain) :]
