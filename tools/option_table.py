"""Writes docs/options.md: every option and parameter with its names by place, from the tables that the places read.

python -m tools.option_table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from hydra_engine.cli.options import grouped_options
from hydra_engine.config import ServerConfig
from hydra_engine.config.fields import Option
from hydra_engine.config.options import all_options, described_default, variable_of
from hydra_engine.config.other_engines import ANYWAY, INSTEAD, REQUEST_INSTEAD, replacement_for
from hydra_engine.core.sampling import PARAMETERS

PATH = Path(__file__).parents[1] / "docs" / "options.md"
_KINDS = {bool: "switch", int: "whole number", float: "number", str: "text", tuple: "list of texts"}
_FORMS = {"seconds": "time", "json": "JSON object", "file": "file", "folder": "folder"}
_HEAD = """# Options

`python -m tools.option_table` writes this page from the table that all places read. An option has one name in them,
here `max-num-seqs`:

| place | |
| --- | --- |
| flag | `--max-num-seqs 8` |
| variable | `HYDRA_MAX_NUM_SEQS=8` |
| key in the file of `--config` | `max-num-seqs: 8` or `max_num_seqs: 8` |
| keyword in Python | `Engine(max_num_seqs=8)` |

Types and texts are the same in all: a whole number may be `4k` (4000) or `4K` (4096), a time `40ms`, `1.5s`, `2m` or a
number of seconds, a switch `on` or `off`; as a flag a switch is `--ui` or `--no-ui`, and a list is a repeated flag.
[cli.md](cli.md#configuration) says which place wins. "Other names" are vLLM's and are taken in all places, and so is
`limit-mm-per-prompt` with `{"image": 4, "video": 0}` for `max-images` and `max-videos`. An option without a keyword
belongs to the server.
"""
_PARAMETERS = """## Parameters of a request

Fields of `SamplingParams`, of a request's body (`grammar` is `response_format` there), and keywords of `generate`,
`chat` and `submit`; [api.md](api.md) has the other fields. The model's generation_config.json may have other defaults.
"""


def page() -> str:
    parts = [_HEAD]
    for title, options in grouped_options({option.field: option for option in all_options()}):
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n{_table(options)}")
    parts.append(f"{_PARAMETERS}\n{_parameters()}")
    refused, taken = (
        _words({name: str(replacement_for(name)) for names in table.values() for name in names})
        for table in (INSTEAD, ANYWAY)
    )
    parts.append(f"## Other engines' names of options\n\nRefused in all places, with what to do instead:\n\n{refused}")
    parts.append(f"Switches that ask for what is so anyway are taken with a note:\n\n{taken}")
    refused = _words({name: reason for reason, names in REQUEST_INSTEAD.items() for name in names})
    parts.append(f"## Other engines' names of parameters\n\nKeywords of `generate`, `chat` and `submit`.\n\n{refused}")
    return "\n".join(parts)


def _table(options: Iterable[Option]) -> str:
    rows = ["flag | variable | keyword | type | default | other names | what", " | ".join(["---"] * 7)]
    for option in options:
        keyword = "" if option.owner is ServerConfig else f"`{option.field}`"
        flag = "MODEL, `--model`" if option.positional else f"`{option.flag}`"
        others = ", ".join(f"`{name}`" for name in option.aliases)
        cells = (
            flag,
            f"`{variable_of(option.name)}`",
            keyword,
            _type(option),
            described_default(option),
            others,
            option.help,
        )
        rows.append(" | ".join(cell.replace("|", "\\|") for cell in cells))
    return "".join(f"| {row} |\n" for row in rows)


def _parameters() -> str:
    rows = ["name | flag of `generate` and `chat` | type | default | what", " | ".join(["---"] * 5)]
    for parameter in PARAMETERS.values():
        flag = f"`--{parameter.name.replace('_', '-')}`" if parameter.flag else ""
        kind = _KINDS.get(parameter.kind, parameter.kind.__name__).removesuffix(" of texts")
        if parameter.low is not None and parameter.high is not None:
            kind += f", {parameter.low:.12g} to {parameter.high:.12g}" if parameter.name != "seed" else ", 64 bits"
        default = ("off", "on")[parameter.default] if parameter.kind is bool else parameter.default
        default = "" if default in (None, ()) else default
        rows.append(f"`{parameter.name}` | {flag} | {kind} | {default} | {parameter.help}")
    return "".join(f"| {row} |\n" for row in rows)


def _type(option: Option) -> str:
    if option.choices:
        same = [f"{other} ({name})" for other, name in option.other_choices.items()]
        return ", ".join((*option.choices, *same))
    if option.kind is tuple and option.item is int:
        return "list of whole numbers"
    return _FORMS.get(option.form) or _KINDS[option.kind]


def _words(reasons: Mapping[str, str]) -> str:
    """A row per reason with all names that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(f"`{name}`")
    rows = ["name | here", "--- | ---", *(f"{', '.join(several)} | {reason}" for reason, several in names.items())]
    return "".join(f"| {row} |\n" for row in rows)


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
