"""The chat template files of a model directory, in transformers' order of precedence. Reads files and renders nothing;
imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine.core.model_folder import MAX_TEMPLATE_BYTES, read_file, read_text, template_names
from hydra_engine.errors import CheckpointError, ConfigError

_OLDER = "chat_template.json"
NO_TEMPLATE = "the model has no chat template; give one with --chat-template FILE"


class ChatTemplates(NamedTuple):
    """The templates of a model. `with_tools` is for conversations with tools, if the directory has a separate one."""

    default: str | None = None
    with_tools: str | None = None


def find_templates(folder: Path) -> ChatTemplates:
    """Returns the templates; the processor's takes precedence over the tokenizer's. Raises CheckpointError for a broken
    file."""
    template = _checked(read_json(folder, "processor_config.json").get("chat_template"))
    if template is None and read_file(folder, _OLDER) is not None:
        template = _checked(read_json(folder, _OLDER).get("chat_template"))
        if not isinstance(template, str):
            raise CheckpointError(f"{_OLDER} is broken")
    if isinstance(template, str) and template:
        return ChatTemplates(template)
    files = {Path(name).stem: read_text(folder, name) for name in ("chat_template.jinja", *template_names(folder))}
    named: dict[str, Any] = {name: text for name, text in files.items() if text is not None}
    if "chat_template" in named:
        named["default"] = named.pop("chat_template")
    if not named:
        template = read_json(folder, "tokenizer_config.json").get("chat_template")
        entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
        named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    known = {name: _checked(text) for name, text in named.items() if isinstance(text, str) and text}
    return ChatTemplates(known.get("default"), known.get("tool_use"))


def check_template(folder: Path, given: str | None) -> None:
    """Raises ConfigError or CheckpointError if no chat could be rendered. Call it before the model is loaded."""
    if given is not None:
        read_template(given)
    elif find_templates(folder).default is None:
        raise ConfigError(NO_TEMPLATE, param="chat_template")


def read_template(path: str) -> str:
    """Reads the operator's template. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the chat template {path}: {reason}", param="chat_template") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns the object in a JSON file, {} if it is missing. Raises CheckpointError."""
    data = read_file(folder, name)
    try:
        parsed = {} if data is None else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{name} is not a JSON object")
    return parsed


def _checked(template: Any) -> Any:
    """Applies the size limit of template files to a template inside another file."""
    if isinstance(template, str) and len(template) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"the chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return template
