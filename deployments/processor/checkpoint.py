"""What a checkpoint holds, loaded in one place: tokenizer and template, processor, model.

`transformers` is imported inside the functions, so that whoever only wants a stage's config pays nothing.
No loader runs code from a checkpoint (`trust_remote_code` is never on).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deployments.types import Modality

# Checkpoints that are shipped with the code: name -> folder.
BUNDLED = {"tiny-omni": Path(__file__).parents[1] / "tiny_omni"}

# Processors that take placeholders and template from their tokenizer as they stand. For these the tokenizer
# stage needs no processor, and so neither torch nor the seconds and the memory that importing it takes.
_TOKENIZER_SUFFICES = frozenset({"Qwen2_5OmniProcessor"})

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


def resolve(model: str) -> str:
    """The folder of a bundled name, or `model` as it is: a folder, or a name on the Hugging Face hub."""
    if model in BUNDLED:
        return str(BUNDLED[model])
    folder = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) and not folder.is_dir():
        raise FileNotFoundError(f"model {model!r}: there is no such folder")
    return str(folder) if folder.is_dir() else model


@dataclass(frozen=True, slots=True)
class Prompting:
    """What turns a conversation into token ids."""

    tokenizer: Any  # a fast tokenizer of transformers
    chat_template: str
    placeholders: dict[Modality, str]  # the special token that stands for one item
    add_special_tokens: bool = True  # what the processor does when the template writes no bos token


def load_prompting(model: str, chat_template: str = "") -> Prompting:
    """Tokenizer, template and placeholders, without torch where the checkpoint allows it.

    `chat_template`: a file with one to use instead of the checkpoint's.
    """
    folder = Path(resolve(model))
    config = _read_json(folder / "tokenizer_config.json")
    if config.get("processor_class") in _TOKENIZER_SUFFICES and (folder / "chat_template.jinja").is_file():
        import transformers

        # By its class: `AutoTokenizer` would import torch.
        tokenizer = getattr(transformers, config["tokenizer_class"]).from_pretrained(folder)
        placeholders = {m: token for m in Modality if (token := getattr(tokenizer, f"{m}_token", None))}
        return Prompting(tokenizer, _read(chat_template) or tokenizer.chat_template, placeholders)

    return prompting_of(load_processor(model, chat_template))


def prompting_of(processor: Any) -> Prompting:
    template = processor.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        family = type(processor).__name__
        raise ValueError(f"the checkpoint has no chat template ({family}); name a file as chat_template")
    text_kwargs = getattr(processor, "text_kwargs", {})
    return Prompting(
        tokenizer=getattr(processor, "tokenizer", processor),
        chat_template=template,
        placeholders=placeholders_of(processor),
        add_special_tokens=text_kwargs.get("add_special_tokens", True),
    )


def load_processor(model: str, chat_template: str = "") -> Any:
    """The checkpoint's processor; for a model of text alone, its tokenizer. `chat_template`: as above.

    A class of processor may fix the size of videos over what the checkpoint says of its own video processor.
    Where the checkpoint does say, it wins here.
    """
    from transformers import AutoProcessor

    name = resolve(model)
    processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    own_size = _read_json(Path(name, "processor_config.json")).get("video_processor", {}).get("size")
    if not getattr(processor, "chat_template", None) and hasattr(processor, "tokenizer"):
        # Some classes of processor drop the template that the checkpoint's tokenizer keeps.
        processor.chat_template = processor.tokenizer.chat_template
    if chat_template:
        processor.chat_template = _read(chat_template)
    if own_size and "size" in getattr(processor, "videos_kwargs", {}):
        processor.videos_kwargs = {**processor.videos_kwargs, "size": own_size}
    return processor


def placeholders_of(processor: Any) -> dict[Modality, str]:
    """The modalities that a processor takes, and the token that stands for one item of each."""
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
    """The model in evaluation mode. Of a full Omni checkpoint, the part that reads and answers in text.

    `auto` is the checkpoint's own dtype, but float32 on a CPU: most are slow at half precision.
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
        # Full Omni checkpoints leave it to their own `generate`; without it no answer would end.
        defaults.eos_token_id = load_prompting(model).tokenizer.eos_token_id
    return loaded.to(device).eval()


def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8") if file else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
