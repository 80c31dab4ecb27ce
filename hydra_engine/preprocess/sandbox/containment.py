"""Containment of a child before it takes untrusted jobs: privileges, access by other processes, and system calls.

The filter of system calls, a BPF program, refuses what a compromised decoder could use to reach beyond its process. It
lists what is forbidden, since what the libraries need differs between versions. Forbidden are the network, other
programs and processes, changes to files, and administrators' calls; what remains reads files, uses memory and threads,
and communicates over existing descriptors. Does not know what the children do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterator

from hydra_engine.core.processes.privacy import forbid_access_by_others

# Name, number on x86_64, number on aarch64; a dash if a machine does not have it.
_NETWORK = "socket 41 198, socketpair 53 199, connect 42 203, bind 49 200"
_FORBIDDEN = """
listen 50 201, accept 43 202, accept4 288 242,
execve 59 221, execveat 322 281, fork 57 -, vfork 58 -,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448,
kcmp 312 272, pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424,
unshare 272 97, setns 308 268, chroot 161 51, pivot_root 155 41, mount 165 40, umount2 166 39, fsopen 430 430,
fsconfig 431 431, fsmount 432 432, fspick 433 433, open_tree 428 428, open_tree_attr 467 467, move_mount 429 429,
mount_setattr 442 442, swapon 167 224, swapoff 168 225, quotactl 179 60, quotactl_fd 443 443, acct 163 89,
reboot 169 142, sethostname 170 161, setdomainname 171 162, init_module 175 105, finit_module 313 273,
delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, bpf 321 280, perf_event_open 298 241,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
add_key 248 217, request_key 249 218, keyctl 250 219, userfaultfd 323 282, fanotify_init 300 262,
name_to_handle_at 303 264, open_by_handle_at 304 265, syslog 103 116, vhangup 153 58, iopl 172 -, ioperm 173 -,
modify_ldt 154 -, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266,
setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147, setresgid 119 149,
setgroups 116 159, setfsuid 122 151, setfsgid 123 152, capset 126 91,
creat 85 -, openat2 437 437, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -,
linkat 265 37, symlink 88 -, symlinkat 266 36, mkdir 83 -, mkdirat 258 34, rmdir 84 -, mknod 133 -, mknodat 259 33,
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
truncate 76 45, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466,
shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, semget 64 190, semop 65 193,
mq_open 240 180, mq_unlink 241 181
"""
# Allowed only with the calling process as first argument.
_OWN = (
    "kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, prlimit64 302 261"
)
_OPEN, _OPENAT, _CLONE, _CLONE3, _PRCTL, _IOCTL = (2, None), (257, 56), (56, 220), (435, 435), (157, 167), (16, 29)
_SECCOMP = (317, 277)

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables above, AUDIT_ARCH
_X32 = 0x40000000  # first number of x86_64's second table

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_TIOCSTI = 0x5412  # types into a terminal
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

# <linux/bpf_common.h>, <linux/seccomp.h>
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16

_Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, operand


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(*, network: bool) -> str | None:
    """Installs the filter in all threads of this process; with `network` it may make connections. Returns None, or the
    reason why this kernel cannot."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return f"there is no filter for {platform.machine()}"
    column, audit_arch = machine
    number = _SECCOMP[column]
    instructions = [struct.pack("=HBBI", *one) for one in _filter(column, audit_arch, network)]
    program = _Program(len(instructions), b"".join(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    result = libc.syscall(ctypes.c_long(number), _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(program))
    if result == 0:
        return None
    return os.strerror(ctypes.get_errno()) if result < 0 else "a thread has a filter of its own"


def _filter(column: int, audit_arch: int, network: bool) -> Iterator[_Instruction]:
    yield _LOAD, 0, 0, _MACHINE_AT
    yield _EQUAL, 1, 0, audit_arch
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER_AT
    if column == 0:
        yield _AT_LEAST, 0, 1, _X32
        yield _RETURN, 0, 0, _KILL
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    for number in _numbers(_FORBIDDEN if network else f"{_FORBIDDEN}, {_NETWORK}", column):
        yield _EQUAL, 0, 1, number
        yield refuse
    yield _EQUAL, 0, 1, _CLONE3[column]  # its arguments cannot be inspected; the C library falls back to clone
    yield _RETURN, 0, 0, _ERROR | errno.ENOSYS
    pid = os.getpid()
    for number in _numbers(_OWN, column):
        yield from _where(number, 0, [(_EQUAL, 1, 0, pid), refuse], also=[(_EQUAL, 2, 0, 0)])
    for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)):
        if (opens := numbers[column]) is not None:
            yield from _where(opens, argument, [(_ANY_BIT, 0, 1, _WRITING), refuse])
    yield from _where(_CLONE[column], 0, [(_ANY_BIT, 1, 0, _CLONE_THREAD), refuse])
    for operation in (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE):
        yield from _where(_PRCTL[column], 0, [(_EQUAL, 0, 1, operation), refuse])
    yield from _where(_IOCTL[column], 1, [(_EQUAL, 0, 1, _TIOCSTI), refuse])
    yield _RETURN, 0, 0, _ALLOW


def _where(
    number: int, argument: int, test: list[_Instruction], also: list[_Instruction] | None = None
) -> Iterator[_Instruction]:
    """Instructions that test the low half of an argument of one call, then reload the call's number."""
    body = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *(also or ()), *test]
    yield _EQUAL, 0, len(body), number
    yield from body
    yield _LOAD, 0, 0, _NUMBER_AT


def _numbers(table: str, column: int) -> Iterator[int]:
    for entry in table.split(","):
        number = entry.split()[1 + column]
        if number != "-":
            yield int(number)


_CAPABILITY_VERSION = 0x20080522  # <linux/capability.h>
_CAP_DAC_READ_SEARCH = 1 << 2  # kept, since modules imported later may be unreadable without it


def give_up_privileges() -> None:
    """Drops root's privileges, and keeps other processes of the same user from reading this one's memory, environment
    or descriptors, so that a compromised child cannot reach another."""
    if sys.platform != "linux":
        return
    forbid_access_by_others()
    libc = ctypes.CDLL(None)
    kept = _effective_capabilities(libc) & _CAP_DAC_READ_SEARCH
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def forbid_calls(*, network: bool) -> str | None:
    """Forbids system calls that jobs do not need. Returns None, or the reason why that is not possible here."""
    if sys.platform != "linux":
        return f"there is no filter for {sys.platform}"
    return install_filter(network=network)


def _effective_capabilities(libc: ctypes.CDLL) -> int:
    """The first 32 effective capabilities, as bits."""
    sets = ctypes.create_string_buffer(24)
    libc.capget(struct.pack("=Ii", _CAPABILITY_VERSION, 0), sets)
    return int(struct.unpack("=6I", sets.raw)[0])
