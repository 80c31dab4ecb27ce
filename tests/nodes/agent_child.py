"""A process that agents start in tests: repeats its order to the frontend, and says who is connected with it."""

from __future__ import annotations

import argparse
import socket

from hydra_engine.cluster.channel import decode_connect, receive_with


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name")
    parser.add_argument("--fd", type=int)
    parser.add_argument("--control", type=int)
    arguments = parser.parse_args()
    frontend, control = socket.socket(fileno=arguments.fd), socket.socket(fileno=arguments.control)
    for sock in (frontend, control):
        sock.setblocking(True)
    frontend.sendall(control.recv(4096) + b"\n")
    while True:
        datagram, descriptors = receive_with(control, 4096, 1)
        if not datagram:
            return
        peer = decode_connect(datagram)
        with socket.socket(fileno=descriptors[0]) as link:
            link.setblocking(True)
            link.sendall(arguments.name.encode() + b"\n")
            said = link.makefile().readline().strip()
            frontend.sendall(f"{peer.name} {peer.incarnation} {link.family.name} {said}\n".encode())


if __name__ == "__main__":
    main()
