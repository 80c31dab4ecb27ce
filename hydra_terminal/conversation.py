"""The conversation of `chat`: turns, attachments of the next question, and sampling settings.

The server checks pictures; here a path is only checked for typing mistakes.
"""

from __future__ import annotations

import base64
import mimetypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hydra_engine.config import MediaConfig
from hydra_engine.core.sampling import PARAMETERS
from hydra_engine.core.units import size
from hydra_engine.errors import ConfigError

_KINDS = ("image", "video")
# The names that /set accepts: numeric fields of a request.
NUMBERS: dict[str, type] = {
    **{p.name: p.kind for p in PARAMETERS.values() if p.flag and p.kind in (int, float)},
    **{"priority": int, "ttft_ms": float, "tpot_ms": float},
}


@dataclass(frozen=True, slots=True)
class Attachment:
    """A picture or a video: `url` is sent to the server, `name` and `note` are displayed."""

    kind: str  # image or video
    name: str
    url: str
    note: str = ""

    @property
    def described(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    def part(self) -> dict[str, Any]:
        field = f"{self.kind}_url"
        return {"type": field, field: {"url": self.url}}


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    text: str
    attachments: tuple[Attachment, ...] = ()
    stopped: bool = False  # the user stopped the answer

    def message(self) -> dict[str, Any]:
        if not self.attachments:
            return {"role": self.role, "content": self.text}
        parts = [attachment.part() for attachment in self.attachments]
        return {"role": self.role, "content": [*parts, {"type": "text", "text": self.text}]}


@dataclass(slots=True)
class Conversation:
    """The turns and settings. `question` is the last question without an answer; `/retry` sends it again. `limits`: the
    server's, by default those of a server with default options."""

    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    limits: MediaConfig = field(default_factory=MediaConfig)
    turns: list[Turn] = field(default_factory=list)
    attached: list[Attachment] = field(default_factory=list)
    question: Turn | None = None

    def attach(self, word: str, kind: str) -> Attachment:
        """Attaches a picture or a video to the next question. Raises ConfigError."""
        item = attachment(word, kind, self.limits)
        self.attached.append(item)
        return item

    def ask(self, text: str) -> None:
        self.question = Turn("user", text, tuple(self.attached))
        self.attached = []

    def answered(self, text: str, *, stopped: bool = False) -> None:
        assert self.question is not None
        self.turns += [self.question, Turn("assistant", text, stopped=stopped)]
        self.question = None

    def take_back(self) -> bool:
        """Removes the last answer and reopens its question; False if there was none."""
        if self.question is None and self.turns:
            self.question = self.turns[-2]
            del self.turns[-2:]
        return self.question is not None

    def clear(self) -> None:
        self.turns, self.attached, self.question = [], [], None

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        open_question = [self.question] if self.question else []
        return [*system, *(turn.message() for turn in (*self.turns, *open_question))]

    def set(self, name: str, text: str) -> None:
        """Sets a sampling parameter, or resets it ("off"). Raises ConfigError; the server checks ranges."""
        name = name.replace("-", "_")
        if name == "stop":
            self.settings["stop"] = text
            return
        if name not in NUMBERS:
            raise ConfigError(f"{name[:40]!r} cannot be set; the names are {', '.join((*NUMBERS, 'stop'))}")
        if text in ("off", "default", "none"):
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = NUMBERS[name](text)
        except (ValueError, OverflowError) as error:
            kind = "a whole number" if NUMBERS[name] is int else "a number"
            raise ConfigError(f"{name} takes {kind}, or off") from error


def attachment(word: str, kind: str, limits: MediaConfig) -> Attachment:
    """An attachment from a path, a file:// or http(s):// address, or a data URI. Raises ConfigError."""
    if word.startswith(("http://", "https://")):
        return Attachment(kind, urlsplit(word).path.rsplit("/", 1)[-1] or word[:60], word, "fetched by the server")
    if word.startswith("data:"):
        return Attachment(kind, "data URI", word)
    path = Path(unquote(urlsplit(word).path)) if word.startswith("file://") else Path(word).expanduser()
    try:
        max_bytes = limits.max_video_bytes if kind == "video" else limits.max_image_bytes
        if path.stat().st_size > max_bytes:
            raise ConfigError(f"{path} is larger than {size(max_bytes)}, which servers refuse")
        data = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "no such file"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    media_type = mimetypes.guess_type(path.name)[0] or ""
    if not media_type.startswith(_KINDS):
        media_type = "image/png" if kind == "image" else "video/mp4"  # the server looks at the bytes
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    note = f"{_pixels(path)}{size(len(data))}" if kind == "image" else size(len(data))
    return Attachment(kind, path.name, url, note)


def _pixels(path: Path) -> str:
    """The size in pixels as text. Raises ConfigError for a file that is not a picture."""
    from PIL import Image, UnidentifiedImageError  # slow to import, and only pictures need it

    try:
        with Image.open(path) as picture:
            return f"{picture.width} x {picture.height}, "
    except UnidentifiedImageError as error:
        raise ConfigError(f"{path} is not a picture") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""  # the server reports the error
