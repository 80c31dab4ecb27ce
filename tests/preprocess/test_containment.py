"""Actions that sandboxed children cannot do, asked of a child that tries."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hydra_engine.core.processes.launch import PARENT
from hydra_engine.preprocess.media.opening import Decoders
from hydra_engine.preprocess.sandbox import child_host, containment
from hydra_engine.preprocess.sandbox.child_host import ChildHost
from hydra_engine.preprocess.sandbox.grammars import Grammars

TOKENIZER = Path(__file__).parents[2] / "hydra_engine" / "demo" / "model" / "tokenizer.json"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.path.exists("/proc/sys/kernel/seccomp"), reason="needs a kernel with seccomp"
)

# Each job is an expression; the answer is what it gives or the name of its error.
CHILD = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, subprocess, sys, threading, time
import msgspec
from hydra_engine.preprocess.sandbox.child_loop import serve

class Answer(msgspec.Struct):
    text: str

def call(*arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(*map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def thread():
    done = threading.Event()
    threading.Thread(target=done.set).start()
    return done.wait(30)

def answer(job, memory):
    try:
        return Answer(repr(eval(job)))
    except OSError as error:
        return Answer(errno.errorcode[error.errno])

serve(msgspec.msgpack.Decoder(str), lambda: answer, network=len(sys.argv) > 2)
"""


class Answer(msgspec.Struct):
    text: str


def host_of(**options: object) -> ChildHost[Answer]:
    return ChildHost("try", [sys.executable, "-c", CHILD], Answer, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def child() -> Iterator[ChildHost[Answer]]:
    host = host_of()
    yield host
    host.close()


def tried(child: ChildHost[Answer], expression: str) -> str:
    return child.run(expression, 30)[0].text


@pytest.mark.parametrize(
    "expression",
    [
        "socket.socket()",
        "socket.socketpair()",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['/bin/true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "call(56 if os.uname().machine == 'x86_64' else 220, 17, 0, 0, 0, 0)",  # clone without a thread
        "os.kill(os.getppid(), 0)",
        "os.kill(1, 0)",
        "os.kill(-1, 0)",
        "signal.pidfd_send_signal(0, 0)",
        "os.pidfd_open(os.getppid())",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
        "os.open('/dev/null', os.O_WRONLY)",
        "os.open('/dev/null', os.O_RDWR)",
        "open('/tmp/hydra-never', 'w')",
        "os.mkdir('/tmp/hydra-never')",
        "os.unlink('/tmp/hydra-never')",
        "os.rename('/tmp/hydra-never', '/tmp/hydra-ever')",
        "os.symlink('/tmp/a', '/tmp/hydra-never')",
        "os.chmod('/proc/self', 0)",
        "os.setuid(0)",
        "os.chroot('/')",
        "call(425, 1, 0)",  # io_uring_setup
        "call(321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0)",  # bpf
        "call(250 if os.uname().machine == 'x86_64' else 219, 0, 0)",  # keyctl
        "call(101 if os.uname().machine == 'x86_64' else 117, 0, 0, 0, 0)",  # ptrace
        "call(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)",  # unshare
        "call(165 if os.uname().machine == 'x86_64' else 40, 0, 0, 0, 0, 0)",  # mount
        "call(157 if os.uname().machine == 'x86_64' else 167, 1, 0, 0, 0, 0)",  # prctl: outlive the parent
        "call(157 if os.uname().machine == 'x86_64' else 167, 4, 1, 0, 0, 0)",  # prctl: be looked into
    ],
)
def test_what_no_decoder_needs_is_refused(child: ChildHost[Answer], expression: str) -> None:
    assert tried(child, expression) == "EPERM"


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("thread()", "True"),
        ("os.kill(os.getpid(), 0)", "None"),
        ("os.open('/dev/null', os.O_RDONLY) > 2", "True"),
        ("len(os.urandom(4))", "4"),
        ("len(mmap.mmap(-1, 1 << 20))", str(1 << 20)),
        ("resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "None"),
        ("len(os.listdir('/proc/self/fd')) < 10", "True"),
        ("'OPENSSL' in os.environ or len(os.environ) < 12", "True"),
    ],
)
def test_what_libraries_need_is_not(child: ChildHost[Answer], expression: str, answer: str) -> None:
    assert tried(child, expression) == answer


def test_with_the_network_connections_can_be_made_and_nothing_else() -> None:
    host = host_of(setup=["network"])
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert tried(host, f"socket.create_connection(('127.0.0.1', {port}), 10).getpeername()[1]") == str(port)
        assert tried(host, "socket.create_server(('127.0.0.1', 0))") == "EPERM"
        assert tried(host, "os.fork()") == "EPERM"
    finally:
        host.close()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def test_every_thread_of_every_kind_of_child_is_contained() -> None:
    decoders, grammars = Decoders(), Grammars(TOKENIZER, (2,))
    hosts = (decoders.pictures, decoders.videos, grammars._host)
    try:
        for host in hosts:
            host.start()
            (pid,) = host.pids()
            for thread in os.listdir(f"/proc/{pid}/task"):
                status = status_of(int(thread))
                assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
                assert int(status["CapEff"], 16) & ~0x4 == 0  # what root may read, it still may
            environment = (
                Path(f"/proc/{pid}/environ").read_bytes() if os.access(f"/proc/{pid}/environ", os.R_OK) else b""
            )
            assert b"KEY" not in environment and b"TOKEN" not in environment
    finally:
        decoders.close()
        grammars.close()


def test_a_machine_without_a_filter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containment.platform, "machine", lambda: "vax")
    assert containment.install_filter(network=False) == "there is no filter for vax"


def test_a_child_without_a_filter_works_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    child_host.warn_uncontained.cache_clear()
    code = (
        "from hydra_engine.preprocess.sandbox import containment; containment.install_filter = lambda **_: 'old kernel'"
        + CHILD
    )
    for _ in range(2):
        host = ChildHost("try", [sys.executable, "-c", code], Answer)
        try:
            assert tried(host, "6 * 7") == "42"
        finally:
            host.close()
    assert caplog.text.count("old kernel") == 1


PARENT_CODE = """
import sys, time
from hydra_engine.preprocess.media.opening import Decoders
decoders = Decoders()
decoders.pictures.start()
decoders.videos.start()
print(*decoders.pictures.pids(), *decoders.videos.pids(), flush=True)
time.sleep(600)
"""


def test_a_stopped_child_does_not_outlive_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT_CODE], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    end = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """A zombie, whose new parent has not reaped it, is not."""
    try:
        return status_of(pid)["State"][0] not in "ZX"
    except OSError:
        return False


def test_a_child_whose_parent_died_before_it_could_tell_the_kernel_ends() -> None:
    """A child ends if its parent is another process than the one that it was started for."""
    environment = {**os.environ, PARENT: "1"}
    ours, theirs = socket.socketpair()
    module = "hydra_engine.preprocess.sandbox.image_child"
    command = [sys.executable, "-m", "hydra_engine.core.processes.launch", module, str(theirs.fileno())]
    with ours, theirs:
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], env=environment, check=False, timeout=30)
        assert ended.returncode == 1
