"""The parts of a chat message's content, and their conversion for the engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from hydra_engine.core import call
from hydra_engine.server.protocol.fields import MediaUrl, Text

ImageDetail = Literal["auto", "low", "high", "original"]


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: Text


class RefusalContent(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The refusal of an earlier answer, read as its text."""

    refusal: Text


class ImageUrl(msgspec.Struct, frozen=True):
    url: MediaUrl
    detail: ImageDetail | None = None


class ImageContent(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | MediaUrl


class VideoUrl(msgspec.Struct, frozen=True):
    url: MediaUrl


class VideoContent(msgspec.Struct, frozen=True, tag_field="type", tag="video_url"):
    """A video in the form of vLLM's server; OpenAI's API has none."""

    video_url: VideoUrl | MediaUrl


AnyPart = TextContent | RefusalContent | ImageContent | VideoContent


def chat_part(part: AnyPart, where: str) -> call.TextPart | call.MediaPart:
    if isinstance(part, TextContent):
        return call.TextPart(part.text)
    if isinstance(part, RefusalContent):
        return call.TextPart(part.refusal)
    if isinstance(part, VideoContent):
        video, param = part.video_url, f"{where}.video_url"
        return call.VideoPart(*((video.url, f"{param}.url") if isinstance(video, VideoUrl) else (video, param)))
    picture, param = part.image_url, f"{where}.image_url"
    if isinstance(picture, str):
        return call.ImagePart(picture, param)
    return call.ImagePart(picture.url, f"{param}.url", detail_of(picture.detail))


def detail_of(detail: ImageDetail | None) -> call.Detail:
    """The engine's `detail`; `original` becomes `high`, the default is `auto`."""
    return "high" if detail == "original" else detail or "auto"
