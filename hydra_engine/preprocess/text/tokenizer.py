"""Text to token ids and back, with the model's own tokenizer files; and back token by token, for a stream.

Knows transformers' tokenizer and the byte-level alphabet. The detokenizer emits whole characters only, finds stop
strings across tokens, and takes amortised constant time per token: the pieces of a request, joined, equal the decoding
of all its tokens at once, up to a stop string. Does not know chat templates beyond rendering a given one, or
end-of-sequence tokens. Importing it imports neither torch nor transformers. The methods of `Tokenizer` are thread-safe.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

import msgspec
from tokenizers import AddedToken, Encoding, decoders
from tokenizers import Tokenizer as Backend

from hydra_engine.core.logprobs import FIRST, SILENT
from hydra_engine.core.model_folder import check_small_files, read_file
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import CheckpointError, InvalidRequest
from hydra_engine.preprocess.text.sentence_piece import MODEL_FILE, SENTENCE_PIECE, write_tokenizer
from hydra_engine.preprocess.text.template_files import find_templates, read_json
from hydra_engine.preprocess.text.tokenizer_file import check_tokenizer_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"
LONG_TEXT_CHARS = 2000  # from this length tokenising is worth a thread

_TOKENIZER_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
# What reading a broken tokenizer file raises; tokenizers reports parse errors as a bare Exception.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)


# AutoTokenizer's classes for model types with a spec here; it is not used since it imports torch. A class named in the
# files takes precedence, unless files of that type are known to name a wrong one.
_CLASSES = {
    "internvl": "Qwen2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_vl": "Qwen2Tokenizer",
    "qwen2_5_vl": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "qwen3_vl": "Qwen2Tokenizer",
    "qwen3_vl_moe": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_text": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
}
_WRONGLY_NAMED = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
_PLAIN = {
    "llava",
    "llava_llama",
    "llava_next",
    "minicpmv4_6",
    "mistral",
    "openpangu_vl",
}  # tokenizer.json is used whatever class the files name


def load_tokenizer(model_dir: str | Path, class_name: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face directory; `class_name` and errors as in `load_transformers_tokenizer`."""
    folder = Path(model_dir)
    tokenizer = load_transformers_tokenizer(folder, class_name)
    templates = find_templates(folder)
    return Tokenizer(tokenizer, templates.default, _file_of(folder), templates.with_tools)


def load_transformers_tokenizer(folder: Path, class_name: str | None = None) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a Hugging Face directory, with the class that AutoTokenizer would use: some classes read
    tokenizer.json differently. `class_name`: that class, if known. Raises CheckpointError for missing, broken or
    oversized files."""
    check_small_files(folder)
    if (data := read_file(folder, _TOKENIZER_FILE)) is not None:
        check_tokenizer_file(data)
        loader: Any = _named_class(class_name or _class_name(folder))
    elif (declared := _declared_class(folder)) in SENTENCE_PIECE and (folder / MODEL_FILE).is_file():
        with TemporaryDirectory() as made:
            write_tokenizer(folder, Path(made))
            return load_transformers_tokenizer(Path(made), class_name)
    elif (own := _own_class(declared, folder)) is not None:
        raise CheckpointError(
            f"the tokenizer is a {own[:60]}, whose code comes with the model and is not run; put a {_TOKENIZER_FILE} "
            "beside it, which save_pretrained of transformers writes for a tokenizer with a fast form"
        )
    elif any((folder / name).is_file() for name in _OTHER_FILES):
        from transformers import AutoTokenizer as loader  # only for directories without tokenizer.json
    else:
        raise CheckpointError(f"the model directory has no {_TOKENIZER_FILE}")
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True)
    except _LOAD_ERRORS as error:
        raise CheckpointError(f"the tokenizer files ({_TOKENIZER_FILE}, tokenizer_config.json) are broken") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Backend):
        raise CheckpointError(f"the model directory needs a {_TOKENIZER_FILE}; this tokenizer has no fast form")
    return cast("PreTrainedTokenizerFast", tokenizer)


def _declared_class(folder: Path) -> str | None:
    name = read_json(folder, "tokenizer_config.json").get("tokenizer_class")
    return name if isinstance(name, str) else None


def _own_class(declared: str | None, folder: Path) -> str | None:
    """Returns the class that the files name if its code comes with the model and transformers has none of that name."""
    import transformers

    code = read_json(folder, "tokenizer_config.json").get("auto_map")
    own = isinstance(code, dict) and "AutoTokenizer" in code
    return declared if own and declared is not None and not hasattr(transformers, declared) else None


def _file_of(folder: Path) -> Path | None:
    return file if (file := folder / _TOKENIZER_FILE).is_file() else None


class TokenizerParts(msgspec.Struct):
    """The parts of a tokenizer that are sent between processes; it cannot render templates. `backend`: tokenizer.json,
    as transformers makes it from the model's files."""

    backend: str
    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None
    unnamed_text: str
    chat_template: str | None
    tool_template: str | None


class _Plain(NamedTuple):
    """The attributes of transformers' tokenizer class that `Tokenizer` uses."""

    backend_tokenizer: Backend
    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None
    init_kwargs: Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a model. `vocab_size` includes added tokens; ids from there up to the width of the model's
    logits (padding) decode to nothing. Ids below it without a name decode to tokenizer_config.json's `unnamed_text` if
    there is one, as in models that ship without weights: there every token shows."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | _Plain,
        chat_template: str | None = None,
        file: Path | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._backend: Backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.special_tokens = tuple(token.content for token in added.values() if token.special)
        named = self._backend.get_vocab_size(with_added_tokens=True)
        self.vocab_size: int = max(named, *(id + 1 for id in added)) if added else named
        self._unnamed = str(tokenizer.init_kwargs.get("unnamed_text", "")).encode()
        self.bos_token: str | None = tokenizer.bos_token
        self.eos_token: str | None = tokenizer.eos_token
        self.eos_ids: tuple[int, ...] = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.chat_template = chat_template
        self.tool_template = tool_template  # for conversations with tools, if the files have a separate one
        self.file = file  # the tokenizer.json it was read from, if any
        # With this decoder a token is a fixed byte string and a text is their concatenation.
        self.is_byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(self)

    def check_lengths(self, max_length: int) -> None:
        """Raises CheckpointError if a token has more than `max_length` characters."""
        longest = max(map(len, self._backend.get_vocab()), default=0)
        if longest > max_length:
            raise CheckpointError(f"the tokenizer has a token of {longest} characters; at most {max_length} are taken")

    @classmethod
    def from_parts(cls, parts: TokenizerParts, model_dir: Path) -> Self:
        """Makes a tokenizer that cannot render templates. Raises CheckpointError."""
        data = parts.backend.encode()
        check_tokenizer_file(data)
        backend: Backend = Backend.from_buffer(data)
        unnamed = {"unnamed_text": parts.unnamed_text}
        plain = _Plain(backend, parts.bos_token, parts.eos_token, parts.eos_token_id, unnamed)
        return cls(plain, parts.chat_template, _file_of(model_dir), parts.tool_template)

    def parts(self) -> TokenizerParts:
        """The parts from which `from_parts` makes the same tokenizer."""
        return TokenizerParts(
            self._backend.to_str(),
            self.bos_token,
            self.eos_token,
            next(iter(self.eos_ids), None),
            self._unnamed.decode(),
            self.chat_template,
            self.tool_template,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids; special tokens spelled out in the text become these tokens. Raises InvalidRequest for text
        that is not valid Unicode."""
        return list(_encode(self._backend, text, add_special_tokens=add_special_tokens).ids)

    def with_spellings(self, spellings: Mapping[str, str]) -> Respelled:
        """Returns this tokenizer with other spellings of some tokens, whose usual spellings become plain text."""
        return Respelled(self._backend, spellings)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("token ids must be integers from 0 to 4294967295") from error

    def token(self, token_id: int) -> str | None:
        """The spelling in the vocabulary, None for an id outside it."""
        return self._backend.id_to_token(token_id)

    def tokens(self, token_ids: Iterable[int]) -> list[str]:
        return [self.token(id) or "" for id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; possibly a part of a character."""
        spelling = self._bytes.get(token_id)
        if spelling is None:
            spelling = self._bytes[token_id] = self._spell(token_id)
        return spelling

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a text's first token: SentencePiece decoders drop a space there."""
        raw = self.token_bytes(token_id)
        if self.is_byte_level or self.whole_texts[token_id] is None:
            return raw
        alone = self._backend.decode([token_id], skip_special_tokens=False).encode()
        return alone if raw.endswith(alone) else raw

    def token_text(self, token_id: int) -> str:
        return name_of(self.token_bytes(token_id))

    def apply_template(
        self,
        conversation: list[dict[str, Any]],
        template: str,
        options: TemplateOptions | None = None,
        hide: Callable[[Any], Any] | None = None,
    ) -> str:
        """Renders in transformers' sandbox; raises what the template raises. `hide` is applied to tools and
        variables."""
        options = options or TemplateOptions()
        tools: list[Any] = [dict(tool) for tool in options.tools]
        variables: dict[str, Any] = dict(options.variables)
        if hide is not None:
            tools, variables = hide(tools), hide(variables)
        rendered = self._tokenizer.apply_chat_template(
            conversation,
            tools=tools or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **variables,
        )
        assert isinstance(rendered, str)
        return rendered

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return self._unnamed
        if self.is_byte_level:
            return bytes_of(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # byte fallback of SentencePiece
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        if token_id in self.special_ids:
            return token.encode()
        # A decoder may drop the space before the first token, so the token is decoded after itself.
        alone = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()


class Respelled:
    """A tokenizer that shares another one's model and ids but spells some added tokens differently."""

    def __init__(self, backend: Backend, spellings: Mapping[str, str]) -> None:
        self._original = backend
        self._backend = Backend(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (chosen := getattr(backend, part)) is not None:
                setattr(self._backend, part, chosen)
        known = {token.content: token for _, token in sorted(backend.get_added_tokens_decoder().items())}
        tokens = known | {name: AddedToken(name, special=True) for name in spellings if name not in known}
        self._backend.add_tokens([_spelled(token, spellings.get(name, name)) for name, token in tokens.items()])
        self._ids = {_id_of(self._backend, spellings.get(name, name)): _id_of(backend, name) for name in tokens}
        self._respelled = {_id_of(backend, name): name for name in spellings}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns token ids. Raises InvalidRequest if plain text yields a respelled token, or is not valid Unicode."""
        encoding = _encode(self._backend, text, add_special_tokens=False)
        if add_special_tokens:
            encoding = self._original.post_process(encoding, None, True)
        return [
            id if is_added else self._id(id)
            for id, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        ]

    def _id(self, id: int) -> int:
        if id in self._ids:
            return self._ids[id]
        if id in self._respelled:
            name = self._respelled[id]
            raise InvalidRequest(f"the text {name} would be the model's token of that name; write it in another way")
        return id


def _id_of(backend: Backend, token: str) -> int:
    id = backend.token_to_id(token)
    assert id is not None, f"{token} is in the vocabulary"
    return id


def _encode(backend: Backend, text: str, *, add_special_tokens: bool) -> Encoding:
    try:
        if len(text) < LONG_TEXT_CHARS:
            return backend.encode(text, add_special_tokens=add_special_tokens)
        # The batch form releases the GIL.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except (UnicodeError, TypeError) as error:
        raise InvalidRequest("the text is not valid Unicode (lone surrogates)") from error


def _spelled(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


class _WholeTexts(dict[int, str | None]):
    """The text of each token's bytes, None for a part of a character. A dict that fills itself, as streams look up
    every token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def name_of(raw: bytes) -> str:
    """A token's bytes as text for lists of log probabilities; parts of characters in the form `bytes:\\xe2\\x82`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def bytes_of(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; a token with characters outside the alphabet is UTF-8, as in the
    decoder."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection of bytes and printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _class_name(folder: Path) -> str | None:
    config, settings = (read_json(folder, name) for name in ("config.json", "tokenizer_config.json"))
    model_type, declared = config.get("model_type"), settings.get("tokenizer_class") or config.get("tokenizer_class")
    for name, value in (("model_type", model_type), ("tokenizer_class", declared)):
        if value is not None and not isinstance(value, str):
            raise CheckpointError(
                f"{name} in config.json or tokenizer_config.json must be a text, not {str(value)[:40]!r}"
            )
    class_name: str | None = declared
    if "auto_map" in settings:  # the model's own code, which is not run
        return class_name
    if model_type in _PLAIN:
        return None
    if declared is None or model_type in _WRONGLY_NAMED:
        return _CLASSES.get(str(model_type))
    if declared.removesuffix("Fast") == "LlamaTokenizer" and b'"ByteLevel"' in (
        read_file(folder, _TOKENIZER_FILE) or b""
    ):
        return None  # Llama 3: that class would treat spaces as SentencePiece does
    return class_name


def _named_class(name: str | None) -> type[PreTrainedTokenizerFast]:
    # Imported here, since the import takes half a second.
    import transformers
    from transformers import PreTrainedTokenizerFast

    cls = getattr(transformers, name.removesuffix("Fast"), None) if isinstance(name, str) else None
    if isinstance(cls, type) and issubclass(cls, PreTrainedTokenizerFast):
        return cls
    return PreTrainedTokenizerFast


# ---- token by token

# A character has at most four bytes: more tokens than this that end in no character never complete one.
_MAX_HELD_TOKENS = 8


class IncrementalDetokenizer:
    """The detokenizer of one request. Emits nothing after `stop_string` is set.

    Text of the first `min_tokens - 1` tokens takes no part in a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.stop_string: str | None = None
        self.at_start = True  # no token has added to the text
        self._skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self.spelling = Spelling(tokenizer, self._skipped)
        self._decoder: _Decoder = _ByteDecoder(tokenizer) if tokenizer.is_byte_level else _WindowDecoder(tokenizer)
        self._stops = StopMatcher(sampling.stop) if sampling.stop else None
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; empty while a character or a stop string may be incomplete."""
        return "".join([self.decode_one(token_id) for token_id in token_ids])

    def decode_one(self, token_id: int) -> str:
        self._num_tokens += 1
        if token_id in self._skipped or self.stop_string is not None:
            return ""
        self.at_start = False
        text = self._decoder.decode(token_id)
        return text if self._stops is None else self._matched(text)

    def flush(self) -> str:
        """Returns the text held back, at the end of the request. May complete a stop string."""
        if self.stop_string is not None:
            return ""
        text = self._matched(self._decoder.flush())
        if self._stops is not None and self.stop_string is None:
            text += self._stops.flush()
        return text

    def _matched(self, text: str) -> str:
        if self._stops is None or not text or self._num_tokens < self._min_tokens:
            return text
        certain, self.stop_string = self._stops.match(text)
        if self.stop_string is not None and self._include_stop:
            certain += self.stop_string
        return certain


class Spelling:
    """The spelling of tokens in lists of log probabilities: (name, bytes that it adds to the text)."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __call__(self, token_id: int, place: int) -> tuple[str, bytes]:
        """`place`: flags of `core/logprobs.py`."""
        tokenizer = self._tokenizer
        if place & SILENT or token_id in self._skipped:
            return tokenizer.token_text(token_id), b""
        raw = tokenizer.first_bytes(token_id) if place & FIRST else tokenizer.token_bytes(token_id)
        return name_of(raw), raw


class StopMatcher:
    """A search for the stop string that ends first, however the text is split into pieces (Knuth-Morris-Pratt)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._fallbacks = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # per stop: the number of its characters at the end of the text
        self._held = ""
        self._first_chars = frozenset(stop[0] for stop in stops)

    def match(self, text: str) -> tuple[str, str | None]:
        """Returns (text that is in no stop string, the stop string if one is complete)."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        text = self._held + text
        for position in range(len(self._held), len(text)):
            stop = self._step(text[position])
            if stop is not None:
                self._held = ""
                return text[: position + 1 - len(stop)], stop
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advances every stop by one character. Returns the longest one that is now complete."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            length, fallback = self._matched[index], self._fallbacks[index]
            while length and stop[length] != char:
                length = fallback[length - 1]
            length += stop[length] == char
            self._matched[index] = length
            if length == len(stop) and (complete is None or len(stop) > len(complete)):
                complete = stop
        return complete


@lru_cache(256)  # shared by the answers to one request
def _borders(stop: str) -> list[int]:
    """The length, per prefix, of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    for end in range(1, len(stop)):
        length = borders[end - 1]
        while length and stop[length] != stop[end]:
            length = borders[length - 1]
        borders[end] = length + (stop[length] == stop[end])
    return borders


class _Decoder(Protocol):
    def decode(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteDecoder:
    """A decoder for byte-level vocabularies: emits a character when its bytes are complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._whole_texts = tokenizer.whole_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no character is incomplete

    def decode(self, token_id: int) -> str:
        if self._between and (whole := self._whole_texts[token_id]) is not None:
            return whole
        text = self._utf8.decode(self._bytes_of(token_id))
        self._between = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        self._between = True
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """A decoder for other vocabularies: decodes the newest tokens after the ones before them and takes the difference.

    `tokens[:context]` has been emitted and is kept because decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        self._context = 0

    def decode(self, token_id: int) -> str:
        self._tokens.append(token_id)
        text = self._new_text()
        incomplete = not text or text.endswith(REPLACEMENT)
        if incomplete and len(self._tokens) - self._context < _MAX_HELD_TOKENS:
            return ""
        self._tokens = self._tokens[self._context :]
        self._context = len(self._tokens)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._tokens.clear()
        self._context = 0
        return text

    def _new_text(self) -> str:
        before = self._decode(self._tokens[: self._context], skip_special_tokens=False)
        return self._decode(self._tokens, skip_special_tokens=False)[len(before) :]
