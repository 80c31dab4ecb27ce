"""Processes that begin with everything imported, instead of paying two seconds of a core each for reading torch.

`install()` lets `subprocess.Popen` ask a server for processes that run a module of ours (`python -m hydra_engine ..`):
it has imported what they import, forks, and the fork takes the command's arguments, environment, folder and descriptors
and runs the module from its beginning. It is a process like any other: its own pid, signals, exit code, and an end with
its parent's. What is forked has a server of its own, for the processes that it starts. What differs in more than that,
such as a variable that libraries read when they are imported, is started in full; so is everything where TESTS_EXEC is
set, as `make test-all` does for some. The child that decodes pictures may have less memory than torch takes: another
server, which has imported no more than that child does, forks it for every process.

Knows how processes start; nothing of what they do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hydra_engine.core.processes.launch import PARENT

ROOT = Path(__file__).resolve().parents[1]
EXEC_VARIABLE = "TESTS_EXEC"
_MODULES = ("hydra_engine", "hydra_engine.cluster.process")
_FOLDERS = ("tests.", "bench.")
_SANDBOXED = tuple(f"hydra_engine.preprocess.sandbox.{child}_child" for child in ("text", "fetch", "grammar"))
_SMALL = "hydra_engine.preprocess.sandbox.image_child"
_ADDRESS_VARIABLE = "TESTS_FORKSERVER"  # where the server of small processes listens
_LAST = ("hydra_engine.",)  # these start none that the server could fork
_IMPORTED = (
    "torch",
    "transformers",
    "hydra_engine.instance.build",
    "hydra_engine.engine",
    "hydra_engine.server.runner",
)
_IMPORTED_SMALL = ("hydra_engine.preprocess.media.images", "hydra_engine.preprocess.sandbox.child_loop")
# Read when a library is imported or the interpreter starts.
_EARLY = (
    "HF_",
    "TRANSFORMERS_",
    "TORCH",
    "CUDA_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "ATEN_",
    "ONEDNN_",
    "HYDRA_MAX_CPU_ISA",
    "LD_",
    "LANG",
    "LC_",
    "TRITON_",
    "PYTHON",
)
_LATE = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
_MAX_REQUEST = 1 << 18  # bytes
_MAX_DESCRIPTORS = 32
_PR_SET_PDEATHSIG = 1


class Job(NamedTuple):
    """A process to be forked. `descriptors`: the numbers that the sent ones become."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    new_session: bool
    ignores_interrupts: bool


class Reap(NamedTuple):
    pid: int


# ---- who asks


class Forkserver:
    """The client of this process's forkserver. It is started, or forked, before anything is asked of it."""

    def __init__(self, pid: int | None, sock: socket.socket, environment: dict[str, str]) -> None:
        self._pid = pid  # of a child of this process
        self._socket = sock
        self._environment = environment
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> Forkserver:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the processes of the engine have it
        return cls(*_spawn(environment), environment)

    @classmethod
    def connect(cls, address: str) -> Forkserver:
        """Takes a server of its own from the one of small processes."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(f"\0{address}")
        except OSError:
            sock.close()
            raise
        return cls(None, sock, {})

    def close(self) -> None:
        """Ends the server, by closing its socket."""
        self._socket.close()
        if self._pid is not None:
            os.waitpid(self._pid, 0)

    def has(self, environment: dict[str, str], *, sandboxed: bool) -> bool:
        """True if what was imported under its environment is what would be imported under this one. `sandboxed`
        children compute nothing with what reads these variables."""
        names = {name for name in {*environment, *self._environment} if name.startswith(_EARLY) and name not in _LATE}
        names = set() if sandboxed else names - {"OMP_WAIT_POLICY"}
        known = {str(ROOT), *sys.path, ""}
        return (
            all(environment.get(name) == self._environment.get(name) for name in names)
            and set(environment.get("PYTHONPATH", "").split(os.pathsep)) <= known
            and EXEC_VARIABLE not in environment
        )

    def fork(self, job: Job, descriptors: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(job)], descriptors)
            return int(pickle.loads(self._socket.recv(_MAX_REQUEST)))

    def reap(self, pid: int) -> int:
        """The status of one that has ended, as `os.waitpid` has it."""
        with self._lock:
            self._socket.send(pickle.dumps(Reap(pid)))
            return int(pickle.loads(self._socket.recv(_MAX_REQUEST)))


def _spawn(environment: dict[str, str], *listeners: socket.socket) -> tuple[int, socket.socket]:
    """(pid of a new server, socket whose end is that of the server)"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = [theirs, *listeners]
    command = [sys.executable, "-m", "tests.forkserver", *(str(sock.fileno()) for sock in inherited)]
    with theirs:
        descriptors = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        for sock in inherited:
            os.set_inheritable(sock.fileno(), True)
        return os.posix_spawn(command[0], command, environment, file_actions=descriptors), ours


_popen_in_full = subprocess.Popen
_server: Forkserver | None = None
_small_root: Forkserver | None = None  # forks the servers of all that connect to it
_small_server: Forkserver | None = None
_starting = threading.Lock()


def running() -> Forkserver:
    """Started now at the latest."""
    global _server
    with _starting:
        _server = _server or Forkserver.start()
        return _server


def running_small() -> Forkserver:
    """The server of small processes, that of the process from which this one comes if there is one."""
    global _small_server
    with _starting:
        if _small_server is None:
            try:
                _small_server = Forkserver.connect(os.environ.get(_ADDRESS_VARIABLE, ""))
            except OSError:
                os.environ[_ADDRESS_VARIABLE] = _start_small()
                _small_server = Forkserver.connect(os.environ[_ADDRESS_VARIABLE])
        return _small_server


def _start_small() -> str:
    """Starts a server to connect to; returns its address."""
    global _small_root
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses the name
        listener.listen()
        _small_root = Forkserver(*_spawn(environment, listener), environment)
        return bytes(listener.getsockname()).decode().lstrip("\0")


def _without_launcher(command: list[str]) -> list[str]:
    """The command without the launcher: the server itself binds a forked child to its parent."""
    is_launched = command[1:3] == ["-m", "hydra_engine.core.processes.launch"]
    return command[:2] + command[3:] if is_launched else command


def _is_ours(command: list[str]) -> bool:
    if command[:2] != [sys.executable, "-m"] or EXEC_VARIABLE in os.environ:
        return False
    return command[2] in (*_MODULES, *_SANDBOXED, _SMALL) or command[2].startswith(_FOLDERS)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Asks the server where it can, see there. The rest of it is the library's."""

    _handle: int | None = None  # of the forked process; readable when that has ended
    _forkserver: Forkserver

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any) -> None:  # fmt: skip
        pipes, new_session = rest[:6], rest[11]
        environment = dict(os.environ if env is None else env)
        command = [os.fspath(word) for word in args] if not isinstance(args, str | bytes) else []
        command = _without_launcher(command)
        server = None
        if not shell and preexec_fn is None and _is_ours(command):
            server = running_small() if command[2] == _SMALL else running()
        if server is None or not server.has(environment, sandboxed=command[2] in (*_SANDBOXED, _SMALL)):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
            )  # type: ignore[misc]
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = pipes
        ours = [standard if given == -1 else given for standard, given in enumerate((p2cread, c2pwrite, errwrite))]
        job = Job(
            command[2],
            command[3:],
            environment,
            os.path.abspath(cwd or "."),
            [0, 1, 2, *pass_fds],
            bool(new_session),
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        )
        self._forkserver = server
        try:
            self.pid = server.fork(job, [*ours, *pass_fds])
            self._handle = os.pidfd_open(self.pid)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **options: Any) -> Any:
        if self._handle is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc]
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(False):  # or another thread waits for the end
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._handle is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        if not select.select([self._handle], [], [], 0 if wait_flags else None)[0]:
            return 0, 0
        status = self._forkserver.reap(self.pid)
        os.close(self._handle)
        return self.pid, status


def install() -> None:
    """Forks processes of this one from now on. The server starts with the first process that it can fork."""
    if EXEC_VARIABLE not in os.environ:
        subprocess.Popen = Popen  # type: ignore[misc]


def close() -> None:
    """The server and what it has forked end."""
    global _server, _small_server, _small_root
    servers = [server for server in (_server, _small_server, _small_root) if server is not None]
    if servers:
        subprocess.Popen = _popen_in_full  # type: ignore[misc]
    for server in servers:
        server.close()
    _server = _small_server = _small_root = None


# ---- the server, and what it becomes


def _accept(control: socket.socket, listener: socket.socket) -> socket.socket:
    """Forks a server for each process that connects. Returns in every one of them, with its socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while control not in select.select([control, listener], [], [])[0]:
        connection = listener.accept()[0]
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        parent = os.getpid()
        if user == os.getuid() and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with(parent)
            for sock in (control, listener):
                sock.close()
            return connection
        connection.close()
    os._exit(0)


def _serve(sock: socket.socket) -> Job:
    """Serves until the other side has gone. Returns in every forked process, with its job."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, _MAX_REQUEST, _MAX_DESCRIPTORS)
        if not data:
            os._exit(0)
        request = pickle.loads(data)
        if isinstance(request, Reap):
            sock.send(pickle.dumps(os.waitpid(request.pid, 0)[1]))
            continue
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _die_with(parent)
            sock.detach()  # its number may be one of the job's
            _become(request, descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        sock.send(pickle.dumps(pid))


def _become(job: Job, descriptors: list[int]) -> None:
    """Gives this process the session, descriptors and streams that the job names, and nothing else of the fork
    server's."""
    if job.new_session:
        os.setsid()
    above = max(*job.descriptors, *descriptors) + 1
    moved = [os.dup2(descriptor, above + place) for place, descriptor in enumerate(descriptors)]
    for source, target in zip(moved, job.descriptors, strict=True):
        os.dup2(source, target)
    _close_all_but(job.descriptors)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        is_line_buffered = name == "stderr" or os.isatty(number)
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = open(  # noqa: SIM115 - as long as the process
            number, mode, encoding="utf-8", errors=errors, buffering=1 if is_line_buffered else -1, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(job.environment)
    if PARENT in os.environ:
        os.environ[PARENT] = str(os.getppid())
    os.chdir(job.folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN if job.ignores_interrupts else signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _close_all_but(kept: list[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # the one of the list itself
                os.close(descriptor)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _own_server(job: Job) -> socket.socket | None:
    """Forks the server of this process. None in this process, its end in the server."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        _die_with(parent)
        _stay_quiet([theirs.fileno()])
        ours.detach()
        return theirs
    theirs.close()
    _server = Forkserver(pid, ours, job.environment)
    subprocess.Popen = Popen  # type: ignore[misc]
    return None


def _stay_quiet(kept: list[int]) -> None:
    """A server holds nobody's pipes, and signals to a group are not for it."""
    _close_all_but([0, 1, 2, *kept])
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(*descriptors: int) -> NoReturn:
    """`descriptors`: the socket whose end is that of this server, and for small processes one that listens."""
    for name in _IMPORTED_SMALL if descriptors[1:] else _IMPORTED:
        import_module(name)
    if descriptors[1:]:
        import_module("PIL.Image").init()
    gc.collect()
    gc.freeze()
    _stay_quiet([*descriptors])
    first, *listeners = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    sock: socket.socket | None = _accept(first, listeners[0]) if listeners else first
    while sock is not None:
        job = _serve(sock)
        sock = None if job.module.startswith(_LAST) else _own_server(job)
    sys.argv = [job.module, *job.arguments]
    code = _run(job.module)
    # As an interpreter ends, but that it takes nothing apart: that would copy every page which the server has, too.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # nobody reads, or it was closed
        sys.stdout.flush()
        sys.stderr.flush()
    close()
    os._exit(code)


def _run(module: str) -> int:
    """Runs a module as `__main__`; returns its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


if __name__ == "__main__":
    # Under its name, which `subprocess.Popen` of this process refers to.
    import_module("tests.forkserver").main(*map(int, sys.argv[1:]))
