"""Says what a process has been given, or ends in some way. For test_forkserver.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main(what: str, *arguments: str) -> None:
    if what == "facts":
        os.write(int(arguments[0]), b"through the descriptor")
        open_ones = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        facts = {
            "name": __name__,
            "arguments": arguments,
            "folder": os.getcwd(),
            "word": os.environ["HYDRA_WORD"],
            "input": sys.stdin.readline(),
            # That of the list itself is the lowest that is free.
            "descriptors": [name for name in open_ones if name in (0, 1, 2, int(arguments[0]))],
            "own session": os.getsid(0) == os.getpid(),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        }
        sys.stdout.write(json.dumps(facts))
    elif what == "exit":
        sys.exit(int(arguments[0]))
    elif what == "fail":
        raise ValueError("as it must")
    elif what == "words":
        sys.exit("the last words")
    elif what == "wait":
        print("waiting", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
