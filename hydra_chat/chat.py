"""`hydra-engine chat`: a conversation with a running server, streamed to the terminal, with pictures and timelines.

Ctrl-C stops an answer, a second one quits. If standard input is a pipe, each line is a question and only answers are
printed.
"""

from __future__ import annotations

import argparse
import sys

from hydra_engine.cli.options import DEFAULT_URL, add_sampling_options
from hydra_engine.config import environment_api_keys
from hydra_engine.errors import RequestFailed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument("--model", default=None, metavar="NAME", help="one of the server's models; default: its first")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="the server's API key (default: HYDRA_API_KEY)")
    parser.add_argument("--system", default=None, metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture for the first question; can be repeated"
    )
    parser.add_argument(
        "--timeline",
        action=argparse.BooleanOptionalAction,
        help="show the time of each stage and the causes of late tokens (default: on a terminal)",
    )
    parser.add_argument("--plain", action="store_true", help="no colours")
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    # Imported here: `--help` of other commands needs none of it.
    from hydra_chat.client import Client, ServerError
    from hydra_chat.session import Session

    keys = environment_api_keys()
    client = Client(arguments.url, arguments.api_key or (keys[0] if keys else None))
    try:
        first = client.model(lambda message: sys.stderr.write(f"hydra-engine: {message}\n"))
        return Session(arguments, client, arguments.model or first).run()
    except ServerError as error:
        raise RequestFailed(error.message) from error
