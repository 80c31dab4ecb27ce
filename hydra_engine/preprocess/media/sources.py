"""The media that a request names: URLs, data URLs, files, objects in memory.

`classify` decides what a reference is and whether it may be opened, before anything is; `read_local` reads those that
need no network. A host may be written as an address in any form; pictures are fetched from public addresses only. Does
not resolve names, does not know pictures or videos beyond their limits; errors never quote what was read.
"""

from __future__ import annotations

import binascii
import ipaddress
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image
from yarl import URL

from hydra_engine.config import MediaConfig
from hydra_engine.core.units import size
from hydra_engine.errors import InvalidImage, InvalidRequest, MediaFetchFailed, MediaForbidden

MAX_URL_CHARS = 8192
MAX_AUTHORITY_BYTES = 320  # a name of 253 with a port; longer international names are slow to convert to ASCII

_BASE64_SLICE = 1 << 20  # characters
_WHITE_SPACE = "\t\n\f\r "
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/_=\-\t\n\f\r ]")
_AUTHORITY = re.compile(r"[\x00- ]*(?:[A-Za-z][A-Za-z0-9+.\-]*:)?//([^/?#]*)")
_LEFT_OUT = dict.fromkeys(map(ord, "\t\n\r"))  # parsers of URLs ignore these anywhere
_STANDARD = bytes.maketrans(b"-_", b"+/")  # from the URL-safe alphabet
# Percent-encodings in base64, replaced one after the other, each in one pass.
_ESCAPES = {form % ord(character): character for character in "+/=" + _WHITE_SPACE for form in ("%%%02X", "%%%02x")}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    url: URL
    kind: str  # "image" or "video", here and below: selects limits and the word in messages


@dataclass(frozen=True, slots=True)
class DataUrl:
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: str
    below: str | None  # the file's real path must be in this folder
    kind: str


@dataclass(frozen=True, slots=True)
class InMemory:
    value: Any  # bytes, a Pillow image, an array or a tensor


Source = RemoteFile | DataUrl | LocalFile | InMemory


def classify(value: Any, config: MediaConfig, kind: str = "image") -> Source:
    """Returns the source that a reference names. Cheap, without I/O. Raises MediaForbidden or InvalidRequest."""
    if isinstance(value, os.PathLike):
        value = os.fsdecode(value)
    if isinstance(value, str):
        return _classify_text(value, config, kind)
    if isinstance(value, bytes | bytearray | memoryview):
        return InMemory(bytes(value))
    is_picture = isinstance(value, Image.Image | np.ndarray) or callable(getattr(value, "numpy", None))
    if is_picture and kind == "image":
        return InMemory(value)
    if kind == "video":
        raise InvalidRequest(
            "a video must be a URL, a data URL, a path, bytes, an open file, a list of pictures or an array"
        )
    raise InvalidRequest("an image must be a URL, a data URL, a path, bytes, an open file, a Pillow image or an array")


def read_local(source: DataUrl | LocalFile | InMemory, config: MediaConfig) -> Any:
    """Returns the bytes of an encoded picture or video, or the object in memory unchanged. Blocking. Raises
    InvalidImage, MediaForbidden or MediaFetchFailed."""
    match source:
        case DataUrl():
            return _read_data_url(source, config)
        case LocalFile():
            with with_path_in_errors(source):
                return _read_file(source, config)
        case InMemory():
            return source.value


def _classify_text(text: str, config: MediaConfig, kind: str) -> Source:
    url = text.strip(_WHITE_SPACE)
    scheme, colon, _ = url[:8].lower().partition(":")
    scheme = scheme if colon else ""
    if scheme == "data":
        return DataUrl(url, kind)
    if scheme in ("http", "https"):
        return RemoteFile(checked_url(url, config, kind), kind)
    if scheme == "file":
        return _classify_file_url(text, config, kind)
    if config.local_files and "://" not in text[:64]:
        return LocalFile(text, None, kind)
    raise MediaForbidden(f"{kind}s are accepted as http, https or data URLs")


def _classify_file_url(text: str, config: MediaConfig, kind: str) -> LocalFile:
    rest = text[5:]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
        if host not in ("", "localhost"):
            raise MediaForbidden("file URLs must not name a host")
    if config.local_files:
        return LocalFile(unquote(rest), None, kind)
    if config.allowed_media_path is None:
        raise MediaForbidden("file URLs are not allowed; see --allowed-media-path")
    return LocalFile(unquote(rest), config.allowed_media_path, kind)


def checked_url(location: str, config: MediaConfig, kind: str, redirected_by: URL | None = None) -> URL:
    """Parses a URL, or the target of a redirect, and checks all that its spelling shows. Raises MediaForbidden or
    InvalidRequest."""
    if len(location) > MAX_URL_CHARS:
        raise InvalidRequest(f"the {kind} URL may have at most {MAX_URL_CHARS} characters")
    authority = _AUTHORITY.match(location.translate(_LEFT_OUT))
    if authority is not None and len(authority[1].encode("utf-8", "replace")) > MAX_AUTHORITY_BYTES:
        raise InvalidRequest(f"the {kind} URL is malformed: its host has more than {MAX_AUTHORITY_BYTES} bytes")
    try:
        target = URL(location)
        return _check_url(target if redirected_by is None else redirected_by.join(target), config, kind)
    except ValueError as error:
        raise InvalidRequest(f"the {kind} URL is malformed") from error


def _check_url(url: URL, config: MediaConfig, kind: str) -> URL:
    host = url.raw_host  # the form that is resolved and dialled
    if url.scheme not in ("http", "https") or not host:
        raise MediaForbidden(f"{kind}s are fetched by http and https only")
    if url.user is not None or url.password is not None:
        raise MediaForbidden(f"{kind} URLs must not hold a user name or password")
    if config.allowed_media_domains and _plain(host) not in map(_plain, config.allowed_media_domains):
        raise MediaForbidden(f"{kind}s are not fetched from this host; see --allowed-media-domains")
    address = parse_address(host)
    if not config.allow_private_media:
        # HTTP's ports and unprivileged ones: a GET must not reach a mail server or a shell.
        if url.port not in (80, 443) and not 1024 <= (url.port or 0) <= 65535:
            raise MediaForbidden(f"{kind}s are fetched from ports 80, 443 and above 1023 only")
        if address is not None and not is_public(address):
            raise private(kind)
    return url


def _plain(host: str) -> str:
    """The canonical form of a host name; "" if it is invalid."""
    try:
        return (URL.build(scheme="http", host=host).raw_host or "").lower().rstrip(".")
    except ValueError:
        return ""


def private(kind: str) -> MediaForbidden:
    return MediaForbidden(f"{kind}s are not fetched from private, local or reserved network addresses")


def max_bytes(config: MediaConfig, kind: str) -> int:
    return config.max_video_bytes if kind == "video" else config.max_image_bytes


def _read_data_url(source: DataUrl, config: MediaConfig) -> bytes:
    kind, most = source.kind, max_bytes(config, source.kind)
    head, comma, body = source.text.partition(",")
    media_type, *parameters = head[5:].split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidImage(f"a data URL must have the form data:{kind}/...;base64,...")
    media_type = media_type.strip().lower()
    if media_type and not media_type.startswith((f"{kind}/", "application/octet-stream")):
        raise InvalidImage(f"the data URL does not hold the data of the {kind}", code=f"unsupported_{kind}_format")
    if "%" in body:
        for escape, character in _ESCAPES.items():
            body = body.replace(escape, character)
    num_characters = len(body)
    if num_characters // 4 * 3 > most + 2:
        num_characters -= sum(map(body.count, _WHITE_SPACE))
    if num_characters // 4 * 3 > most + 2:
        raise _too_large(kind, most)
    if not body:
        raise InvalidImage("the data URL holds no data")
    try:
        return _from_base64(body)
    except ValueError as error:
        raise InvalidImage(f"the data URL is not valid base64: {_why_not_base64(body)}") from error


def _from_base64(text: str) -> bytes:
    """Decodes as browsers do: white space is ignored and padding is optional. Raises ValueError. Works in slices,
    because decoding holds the GIL."""
    decoded, rest, has_ended = [], b"", False
    for begin in range(0, len(text), _BASE64_SLICE):
        piece = text[begin : begin + _BASE64_SLICE].encode("ascii", "replace")
        piece = rest + piece.translate(_STANDARD, _WHITE_SPACE.encode())
        if has_ended and piece:
            raise ValueError("data behind padding")
        end = len(piece) // 4 * 4
        decoded.append(binascii.a2b_base64(piece[:end], strict_mode=True))
        has_ended, rest = has_ended or piece.endswith(b"=", 0, end), piece[end:]
    if rest:
        if has_ended or b"=" in rest:
            raise ValueError("wrong padding")
        decoded.append(binascii.a2b_base64(rest + b"=" * (4 - len(rest)), strict_mode=True))
    return b"".join(decoded)


def _why_not_base64(text: str) -> str:
    odd = _NOT_BASE64.search(text)
    if odd is not None:
        return f"character {odd.start() + 1} of its data is not one of base64's"
    data = text.translate(dict.fromkeys(map(ord, _WHITE_SPACE)))
    if "=" in data:
        return "there may be one or two = at its end only, to make its length a multiple of 4"
    return "it is one character too long, or its end is missing"


def _read_file(source: LocalFile, config: MediaConfig) -> bytes:
    kind, most = source.kind, max_bytes(config, source.kind)
    try:
        path = source.path if source.below is None else os.path.realpath(source.path)
        _check_below(path, source.below)
        with open(path, "rb", opener=_open_without_waiting) as file:
            # A folder in the path may have been replaced by a link meanwhile.
            _check_below(os.path.realpath(f"/proc/self/fd/{file.fileno()}"), source.below)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MediaFetchFailed(f"the {kind} file is not a regular file")
            if status.st_size > most:
                raise _too_large(kind, most)
            data = file.read(most + 1)
            if len(data) > most:  # it has grown, or is a file without a size
                raise _too_large(kind, most)
            return data
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if source.below is None:
            raise MediaFetchFailed(_why(error)) from error
        # The operator's folder must not be explored by errors.
        raise MediaFetchFailed(f"the {kind} file cannot be opened") from error


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return (getattr(error, "strerror", None) or "no path").lower()


def _too_large(kind: str, limit: int) -> InvalidImage:
    return InvalidImage(f"the {kind} is larger than {size(limit)}", code=f"{kind}_too_large")


@contextmanager
def with_path_in_errors(source: object) -> Iterator[None]:
    """Prefixes an error about the caller's own file with its path."""
    try:
        yield
    except InvalidRequest as error:
        if isinstance(source, LocalFile) and source.below is None:
            path = f"{source.path}: "
            if not error.message.startswith(path):
                raise error.with_message(path + error.message) from error
        raise


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens without blocking on a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_below(path: str, folder: str | None) -> None:
    if folder is None:
        return
    root = os.path.realpath(folder)
    if os.path.commonpath((root, path)) != root:
        raise MediaForbidden("the file is outside the folder that media may be read from")


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
# A host whose last label is a number is an address to some resolver: 127.1, 0x7f.0.0.1, 2130706433, 0177.0.0.1.
_NUMBER = re.compile(r"(?:\d+|0[xX][0-9a-fA-F]*)")
_NAME = re.compile(r"[A-Za-z0-9_\-.]{1,253}")  # international names are in ASCII form here
_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")  # not in all Python versions


def parse_address(host: str) -> IPAddress | None:
    """The address that a host spells, None for a name. Raises MediaForbidden for odd spellings of an address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and "%" not in host:
        return address
    if not _NAME.fullmatch(host) or _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        raise MediaForbidden("the image URL's host is not a plain name or address")
    return None


def is_public(address: IPAddress) -> bool:
    """True if the address, and every IPv4 address embedded in it, is globally routable."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not address.is_reserved
    translated = address.ipv4_mapped is not None or address in _NAT64
    if address in _DOCUMENTATION:
        return False
    return (address in _GLOBAL_UNICAST or translated) and all(is_public(inner) for inner in _embedded(address))


def _embedded(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """IPv4 addresses that a tunnel, a translator or the kernel would extract from this one."""
    low = int(address) & 0xFFFFFFFF
    embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64 or int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        embedded.append(ipaddress.IPv4Address(low))
    return [inner for inner in embedded if inner is not None]
