"""Encodes a conversation with the checkpoint's template and tokenizer, and finds each item's placeholder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from deployments.errors import InvalidRequest
from deployments.processor.checkpoint import Prompting
from deployments.processor.protocols import Tokenizer
from deployments.types import Affixes, Chat, Modality, Prompt, TokenizerSpec

Message = dict[str, Any]  # for the template: JSON, with media parts as in `Chat`


class ChatEncoder:
    """One tokenizer with its chat template. It must not be used by several threads at once.

    Control tokens that a user typed stay text: they become neither control tokens nor placeholders. Prompt
    embeddings have a placeholder of our own, which templates take for text.
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
        """`affixes`: one pair for each item, in item order; may be left out if all are empty."""
        items = _items(chat)
        token_ids = self._token_ids(chat, list(zip(items, affixes, strict=True)) if affixes else [])
        return Prompt(token_ids, self._find(items, token_ids))

    def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def decode(self, token_ids: list[int]) -> tuple[str, list[str]]:
        """Returns the text, and each token as it is in the vocabulary."""
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
            # If a control token is also a plain token of the vocabulary, it cannot be encoded as text.
            raise InvalidRequest(f"The tokenizer cannot encode this text: {error}") from error
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
            # A template that takes only strings raises this for a list of parts.
            raise InvalidRequest("The model's chat template cannot render this conversation.") from error

    def _fill(self, messages: list[Message], add_generation_prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            **self._tokenizer.special_tokens_map,
        )
        return str(texts[0])

    def adapted(self, message: Message) -> Message:
        """Converts the role and the content of a message if the template takes only another form."""
        role, content = message["role"], message.get("content")
        if role == "developer" and not self._knows_developers:
            role = "system"
        takes_string, takes_parts = (self._takes.get((role, form)) for form in (_as_string, _as_parts))
        if isinstance(content, str) and takes_parts and not takes_string:
            content = _as_parts([content])
        elif isinstance(content, list) and takes_string and not takes_parts and _is_text(content):
            content = _as_string([part["text"] for part in content])
        return {**message, "role": role, "content": content}

    def _renders(self, role: str, form: Callable[[list[str]], object]) -> bool:
        """True if content of this form is rendered as its texts. Some templates print a list's repr."""
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

    def _keep_apart(self, content: str | list[Message]) -> None:
        """Keeps neighbouring texts such as `<|im_` and `end|>` from forming a control token.

        An end marker without a start marker has no other effect than to separate the texts.
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
        """Puts the affixes around their placeholders, so that they are encoded with the text next to them."""
        left = {m: iter([affix for modality, affix in affixes if modality == m]) for m in Modality}

        def with_affixes(match: re.Match[str]) -> str:
            prefix, suffix = next(left[Modality(str(match.lastgroup))], ("", ""))
            return prefix + match.group() + suffix

        return self._placeholders.sub(with_affixes, text)

    def _find(self, items: list[Modality | None], token_ids: list[int]) -> list[tuple[Modality | None, int]]:
        """Finds each item's index in the prompt: the n-th image is at the n-th image placeholder."""
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


_EMBEDDED = "prompt"  # type of a content part of prompt embeddings
_PROMPT = "<|headrace_prompt_embeds|>"


def _with_places(message: Message) -> Message:
    """Replaces prompt embeddings by a text part. The texts of users are marked already."""
    content = message.get("content")
    if isinstance(content, list):
        place = {"type": "text", "text": _PROMPT}
        content = [place if part["type"] == _EMBEDDED else part for part in content]
    return {**message, "content": content}


def _is_text(parts: list[Message]) -> bool:
    return all(part["type"] == "text" for part in parts)


def _as_string(texts: list[str]) -> str:
    return "\n".join(texts)


def _as_parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# The roles of a conversation in which a role may occur, for templates that insist on their order.
_AROUND = {"system": ("system", "user"), "user": ("user",), "assistant": ("user", "assistant")}
_PROBES = ("probe one", "probe two")


def _placeholder_pattern(prompting: Prompting) -> re.Pattern[str]:
    """Matches placeholders that the template wrote, but not those that a user typed, which are marked."""
    from transformers.utils.chat_template_utils import _CONTROL_TOKEN_START

    tokens = [f"(?P<{m}>{re.escape(token)})" for m, token in prompting.placeholders.items()]
    return re.compile(f"(?<!{_CONTROL_TOKEN_START})(?:{'|'.join(tokens) or '(?!)'})")


def _control_tokens(prompting: Prompting) -> re.Pattern[str]:
    """Matches tokens that stay text if a user types them: special ones, and added ones in the template.

    The latter become special here, because transformers can encode only special tokens as text.
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


def _special_token_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    framed = tokenizer.encode("a", add_special_tokens=True)
    start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    return framed[:start], framed[start + len(plain) :]
