"""Loads the parts of a checkpoint: tokenizer and chat template, processor, model.

`transformers` is imported inside the functions, so that importing a stage's config stays cheap. No loader
runs code from a checkpoint (`trust_remote_code` is never on).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from deployments.processor.protocols import Processor, Tokenizer
from deployments.types import Modality

# Checkpoints that are shipped with the code: name -> folder.
BUNDLED = {"tiny-omni": Path(__file__).parents[1] / "tiny_omni"}

# Processors that take placeholders and template unchanged from their tokenizer. For these the tokenizer stage
# loads no processor, and saves the seconds and the memory that importing torch takes.
_TOKENIZER_SUFFICES = frozenset({"Qwen2_5OmniProcessor"})

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


def resolve(model: str) -> str:
    """The folder of a bundled checkpoint, or `model` itself: a folder, or a name on the Hugging Face hub."""
    if model in BUNDLED:
        return str(BUNDLED[model])
    folder = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) and not folder.is_dir():
        raise FileNotFoundError(f"model {model!r}: there is no such folder. Check the path.")
    return str(folder) if folder.is_dir() else model


@dataclass(frozen=True, slots=True)
class Prompting:
    """The parts that turn a conversation into token ids."""

    tokenizer: Tokenizer
    chat_template: str
    placeholders: dict[Modality, str]  # the special token that stands for one item
    add_special_tokens: bool = True  # by the tokenizer, if the template writes no bos token


def load_prompting(model: str, chat_template: str = "") -> Prompting:
    """Loads tokenizer, template and placeholders, without torch if the checkpoint allows it.

    `chat_template`: a file with a template to use instead of the checkpoint's.
    """
    folder = Path(resolve(model))
    config = _read_json(folder / "tokenizer_config.json")
    if config.get("processor_class") in _TOKENIZER_SUFFICES and (folder / "chat_template.jinja").is_file():
        import transformers

        # By its class, because `AutoTokenizer` would import torch.
        tokenizer: Tokenizer = getattr(transformers, config["tokenizer_class"]).from_pretrained(folder)
        placeholders = {m: token for m in Modality if (token := getattr(tokenizer, f"{m}_token", None))}
        return Prompting(tokenizer, _read(chat_template) or tokenizer.chat_template, placeholders)

    return prompting_of(load_processor(model, chat_template))


def prompting_of(processor: Processor) -> Prompting:
    template = processor.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        family = type(processor).__name__
        raise ValueError(f"the checkpoint has no chat template ({family}); name a file as chat_template")
    text_kwargs = getattr(processor, "text_kwargs", {})
    return Prompting(
        tokenizer=tokenizer_of(processor),
        chat_template=template,
        placeholders=placeholders_of(processor),
        add_special_tokens=text_kwargs.get("add_special_tokens", True),
    )


def load_processor(model: str, chat_template: str = "") -> Processor:
    """Loads the checkpoint's processor, or its tokenizer if it takes only text; see `tokenizer_of`.

    Some processor classes set a size for videos that hides the size in the checkpoint's video processor. Here
    the checkpoint's size wins. `chat_template`: as in `load_prompting`.
    """
    from transformers import AutoProcessor

    name = resolve(model)
    processor: Processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    own_size = _read_json(Path(name, "processor_config.json")).get("video_processor", {}).get("size")
    if not getattr(processor, "chat_template", None) and hasattr(processor, "tokenizer"):
        # Some processor classes drop the template that the checkpoint's tokenizer has.
        processor.chat_template = processor.tokenizer.chat_template
    if chat_template:
        processor.chat_template = _read(chat_template)
    kwargs = getattr(processor, "videos_kwargs", {})
    if own_size and "size" in kwargs:
        processor.videos_kwargs = {**kwargs, "size": own_size}
    return processor


def tokenizer_of(processor: Processor) -> Tokenizer:
    """The processor's tokenizer. The processor of a model that takes only text is a tokenizer itself."""
    tokenizer: Tokenizer | None = getattr(processor, "tokenizer", None)
    return tokenizer or cast("Tokenizer", processor)


def placeholders_of(processor: Processor) -> dict[Modality, str]:
    """The modalities that a processor takes, each with the token that stands for one item."""
    workers = {
        Modality.IMAGE: ("image_processor",),
        Modality.AUDIO: ("feature_extractor", "audio_processor"),
        Modality.VIDEO: ("video_processor",),
    }
    return {
        modality: token
        for modality, names in workers.items()
        if (token := getattr(processor, f"{modality}_token", None))
        and any(getattr(processor, name, None) is not None for name in names)
    }


def load_model(model: str, device: str, dtype: DTypeName) -> Any:
    """Loads the model in evaluation mode; from a full Omni checkpoint, only the part that answers in text.

    `auto` is the checkpoint's dtype, except on a CPU: float32, because most CPUs are slow at half precision.
    """
    from transformers import AutoConfig, AutoModelForMultimodalLM, logging

    logging.disable_progress_bar()
    name = resolve(model)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    loaded = AutoModelForMultimodalLM.from_pretrained(
        name,
        config=getattr(config, "thinker_config", config),
        dtype="float32" if dtype == "auto" and device == "cpu" else dtype,
        trust_remote_code=False,
    )
    defaults = loaded.generation_config
    if defaults.eos_token_id is None:
        # Full Omni checkpoints set it only inside their own `generate`. Without it no answer would end.
        defaults.eos_token_id = load_prompting(model).tokenizer.eos_token_id
    return loaded.to(device).eval()


def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8") if file else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
