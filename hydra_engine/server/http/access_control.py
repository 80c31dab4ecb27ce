"""Access control: API keys, the admin key and the tenant of a request, and cross-origin rules for browsers.

An API key opens every route but the admin routes. The admin key opens those and the overviews, which show it all
tenants; they show an API key only its own. A tenant is the holder of a key: keys of one name belong to one tenant, a
key without a name is its own tenant. Each `GenerationCall` of the server takes its `cache_salt` from here (a test
checks this), which isolates the caches of tenants from each other.

Other origins may read answers if they are listed, or with `*`; never with credentials. A server on loopback without
keys is open to every program of this machine, browsers included. A web site whose name is made to resolve to it (DNS
rebinding) counts as the same origin, and its pages send no `Origin` with a GET. Such a server therefore refuses
requests whose `Host` is a name that a public DNS could give out. A preflight carries no key and is answered before keys
are checked. Does not know tenants' limits or requests, or what is cached.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hydra_engine.config import ServerConfig, environment_admin_key, environment_api_key_file, environment_api_keys
from hydra_engine.errors import ConfigError, InvalidApiKey, InvalidRequest
from hydra_engine.server.loggers import route_of
from hydra_engine.server.state import CLIENT, CONFIG, TENANT

logger = logging.getLogger(__name__)

PAGE_FILES = frozenset({"/", "/ui/{file}"})  # static; the page's data comes from /ui/events
OPEN_PATHS = frozenset({"/health", "/livez"}) | PAGE_FILES
ADMIN_PATHS = frozenset({"/admin/topology", "/debug/trace", "/reset_prefix_cache", "/reset_mm_cache"})
OVERVIEW_PATHS = frozenset({"/metrics", "/ui/events"})

MAX_KEYS = 1024  # each request is compared with all of them
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    digest: bytes  # of the key; the key itself is not kept
    tenant: str  # a keyed digest that means nothing to another server
    name: str  # for logs and metrics; empty if it has none


class KeyRing:
    """The keys of the configuration, the environment and the file, which `reload` reads again; only digests are kept.
    `requires_key` and `has_admin_key` are decided at start and never change. `secret` makes tenants unguessable from
    outside and different in every server."""

    def __init__(self, keys: Iterable[str], path: str | None, admin_key: str | None, secret: bytes) -> None:
        """Reads all keys. Raises ConfigError."""
        self.keys: tuple[Key, ...] = ()
        self._admin = None if admin_key is None else _digest(admin_key)
        self._given = [(None, key.strip()) for key in keys if key.strip()]
        self._path = path
        self._secret = secret
        self._read()

    @classmethod
    def empty(cls) -> KeyRing:
        """A key ring that requires no key and has no administrator."""
        return cls((), None, None, b"")

    @classmethod
    def from_config(cls, config: ServerConfig, secret: bytes) -> KeyRing:
        return cls(
            (*config.api_key, *environment_api_keys()),
            config.api_key_file or environment_api_key_file(),
            config.admin_key or environment_admin_key(),
            secret,
        )

    @property
    def requires_key(self) -> bool:
        return bool(self.keys)

    @property
    def has_admin_key(self) -> bool:
        return self._admin is not None

    def find(self, request: web.Request) -> Key | None:
        """The key that the request presents, or None. Compares with every key in full, so the time does not reveal how
        close a guess was."""
        matched = None
        for presented in _presented(request):
            for key in self.keys:
                if hmac.compare_digest(presented, key.digest):
                    matched = key
        return matched

    def is_admin(self, request: web.Request) -> bool:
        admin = self._admin
        matches = [hmac.compare_digest(digest, admin) for digest in _presented(request)] if admin is not None else []
        return any(matches)

    @property
    def has_file(self) -> bool:
        return self._path is not None

    def reload(self) -> None:
        """Reads the file again. An error in it, such as a file without keys, is logged and the keys stay unchanged."""
        try:
            self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error.message)
        else:
            logger.warning("API keys were read again: %d hold now", len(self.keys))

    def _read(self) -> None:
        named = [*self._given, *(_read_file(self._path) if self._path is not None else [])]
        if len(named) > MAX_KEYS:
            raise ConfigError(f"there are {len(named)} API keys; at most {MAX_KEYS} are allowed", param="api_key")
        if any(len(key) > MAX_KEY_CHARS for _, key in named):
            raise ConfigError(f"an API key may have at most {MAX_KEY_CHARS} characters", param="api_key")
        keys = tuple(self._key(name, _digest(key)) for name, key in named)
        if self._admin in {key.digest for key in keys}:
            raise ConfigError("admin_key must not be one of the API keys; choose another one", param="admin_key")
        self.keys = keys

    def _key(self, name: str | None, digest: bytes) -> Key:
        identity = b"name\0" + name.encode() if name is not None else b"key\0" + digest
        tenant = hmac.new(self._secret, b"tenant\0" + identity, hashlib.sha256).hexdigest()[:32]
        return Key(digest, tenant, name or "")


KEYS = web.AppKey("keys", KeyRing)
SALT_SECRET = web.AppKey("salt_secret", bytes)  # random at each start: caches do not outlive the process


def auth_middleware(keys: KeyRing) -> Middleware:
    """Denies by default: without a key only the open paths are served, and without an admin key no ADMIN_PATHS. Without
    API keys everything else is open and requests have no tenant."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = route_of(request)
        if path in ADMIN_PATHS:
            if not keys.is_admin(request):
                raise InvalidApiKey("the admin key is needed: send Authorization: Bearer KEY")
        elif keys.requires_key and path not in OPEN_PATHS and not (path in OVERVIEW_PATHS and keys.is_admin(request)):
            key = keys.find(request)
            if key is None:
                # litellm tells a wrong key from other invalid requests by OpenAI's first four words.
                raise InvalidApiKey("Incorrect API key provided, or none: send Authorization: Bearer KEY")
            request[TENANT] = key.tenant
            if key.name:
                request[CLIENT] = key.name
        return await handler(request)

    return check


def cache_salt(request: web.Request, own: str | None) -> str:
    """The salt that isolates the caches of tenants. `own` is the client's salt, which separates its requests further;
    without keys, or with shared caches, it is the whole salt. Cannot be guessed without the secret."""
    tenant = request.get(TENANT, "")
    if not tenant or request.app[CONFIG].share_caches:
        return own or ""
    text = f"salt\0{tenant}\0{own or ''}".encode("utf-8", "surrogatepass")
    return hmac.new(request.app[SALT_SECRET], text, hashlib.sha256).hexdigest()


def _presented(request: web.Request) -> list[bytes]:
    """Digests of the possible keys in the request: OpenAI's header and Anthropic's."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    presented = [bearer.strip()] if scheme.lower() == "bearer" else []
    presented += [request.headers["X-Api-Key"].strip()] if "X-Api-Key" in request.headers else []
    return [_digest(key) for key in presented]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read_file(path: str) -> list[tuple[str | None, str]]:
    """(name, key) of each line. Raises ConfigError, which names the line, never its content."""
    try:
        with open(path, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                logger.warning("the file of API keys is open to other users of this machine; chmod 600 closes it")
            text = file.read(MAX_FILE_BYTES + 1)
    except UnicodeDecodeError as error:
        raise ConfigError("the file of API keys is not UTF-8 text", param="api_key_file") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the file of API keys: {error.strerror}; it must have a line NAME:KEY for each client "
            "and be readable by this user; a container needs it mounted",
            param="api_key_file",
        ) from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"the file of API keys has more than {MAX_FILE_BYTES} characters", param="api_key_file")
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
    keys = [_parse_line(number, line) for number, line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError("the file of API keys holds no key", param="api_key_file")
    return keys


def _parse_line(number: int, line: str) -> tuple[str | None, str]:
    name, colon, key = line.partition(":")
    if not colon:
        name, key = "", line
    key = key.strip()
    if not key or any(c.isspace() for c in key) or (colon and not _NAME.fullmatch(name)):
        raise ConfigError(
            f"line {number} of the file of API keys must be KEY or NAME:KEY; a name has letters, digits, dots, dashes "
            "and underscores",
            param="api_key_file",
        )
    return name or None, key


# ---- cross-origin rules

_HEADER_LIST = re.compile(r"[A-Za-z0-9\-, ]{1,1024}")
_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After, Server-Timing"
_LOCAL_NAMES = ("localhost", "local", "internal")  # last labels of names that only a local resolver gives out


class Cors:
    def __init__(self, origins: Collection[str], *, only_this_machine: bool = False) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)
        self._names = frozenset(urlsplit(origin).hostname for origin in origins)
        self._only_this_machine = only_this_machine and not self._any

    def headers(self, request: web.Request) -> dict[str, str]:
        """The headers for every answer, including errors and streams."""
        origin = request.headers.get("Origin")
        if self._any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        if not self._origins:
            return {}
        if origin is None or origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self.headers(request))

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._only_this_machine:
                self._refuse_foreign_names(request)
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if not is_preflight or "Access-Control-Allow-Origin" not in self.headers(request):
                return await handler(request)
            response = web.Response(status=204)
            response.headers["Access-Control-Allow-Methods"] = _METHODS
            response.headers["Access-Control-Max-Age"] = "600"
            requested = request.headers.get("Access-Control-Request-Headers", "")
            if _HEADER_LIST.fullmatch(requested):
                response.headers["Access-Control-Allow-Headers"] = requested
            return response

        return answer_preflight

    def _refuse_foreign_names(self, request: web.Request) -> None:
        try:
            name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        except ValueError:
            return  # not what a browser sends
        if name is not None and name not in self._names and not _is_local_name(name):
            raise InvalidRequest(
                f"this server has no keys and is not to be reached as {name[:100]}; see --allow-origins and --api-key"
            )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local_name(name: str) -> bool:
    """True for an address, which cannot be rebound, and for names that no public DNS gives out: names without a dot
    belong to this machine or its network."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        before, _, last = name.rstrip(".").rpartition(".")
        return not before or last in _LOCAL_NAMES or name == socket.gethostname().lower()
    return True
