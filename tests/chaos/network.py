"""Hosts with addresses of their own on this machine, and a switch between them that may be bad.

Each host is a network namespace. All frames between hosts pass through one thread, so that a test chooses their latency
and loss, and which two hosts cannot reach each other. Namespaces go with the processes that use them.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import random
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from farm.local import servers

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of `unshare` and `setns`."""
SOL_PACKET, PACKET_VNET_HDR = 263, 15
"""With this header kernel and switch hand on segments and checksums that are not finished yet."""
IP = 0x0800
DESTINATION = slice(10 + 14 + 16, 10 + 14 + 20)
"""Where a frame has the address it goes to: behind the two headers before IP's."""
HARDWARE = "02:00:00:00:00:01"
"""All hosts have the same, without ARP: nobody waits for an answer that a cut swallows, as behind a router."""

_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """Hosts by their names while its block runs, and the switch. Raises OSError if this process may not make them."""

    def __init__(self, *names: str) -> None:
        self.addresses = {name: f"10.213.0.{number}" for number, name in enumerate(names, 1)}
        self.latency = 0.0
        """Seconds that each frame takes."""
        self.loss = 0.0
        """Share of frames that get lost."""
        self.cuts: set[frozenset[str]] = set()
        """Pairs of hosts whose frames to each other are dropped without a word."""
        self.dropped = 0
        self._chance = random.Random(44)
        self._spaces: dict[str, int] = {}
        self._parts = ExitStack()
        self._closing = threading.Event()

    def __enter__(self) -> Network:
        if not shutil.which("ip"):
            raise FileNotFoundError("`ip` is missing (Debian: iproute2)")
        with self._parts, ExitStack() as stack:
            home = self._open("/proc/thread-self/ns/net")
            stack.callback(_enter, home)
            for name in ["", *self.addresses]:  # The first one is the switch.
                _checked(_libc.unshare(NEW_NETWORK))
                self._spaces[name] = self._open("/proc/thread-self/ns/net")
                _ip("link set lo up")
            _enter(self._spaces[""])
            ports = {name: self._port(name) for name in self.addresses}
            for name, address in self.addresses.items():
                _enter(self._spaces[name])
                _ip("link set eth0 arp off up", f"addr add {address}/24 dev eth0")
            switch = threading.Thread(target=self._switch, args=(ports,), name="switch")
            switch.start()
            self._parts.callback(switch.join)
            self._parts.callback(self._closing.set)
            stack.close()
            self._parts = self._parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Be on a host: what this thread starts and opens meanwhile is there; servers bind its address."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _enter(self._spaces[name])
        try:
            with patch.object(servers, "HOST", self.addresses[name]):
                yield
        finally:
            _enter(before)
            os.close(before)

    def _open(self, path: str) -> int:
        space = os.open(path, os.O_RDONLY)
        self._parts.callback(os.close, space)
        return space

    def _port(self, name: str) -> socket.socket:
        """Connect a host with the switch, and return the switch's end."""
        port = f"to-{name}"[:15]
        space = f"/proc/{os.getpid()}/fd/{self._spaces[name]}"
        _ip(f"link add {port} type veth peer name eth0 address {HARDWARE} netns {space}", f"link set {port} up")
        end = self._parts.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(IP)))
        end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        end.bind((port, IP))
        end.setblocking(False)
        return end

    def _switch(self, ports: dict[str, socket.socket]) -> None:
        """Hand on frames until the block ends."""
        names = {socket.inet_aton(address): name for name, address in self.addresses.items()}
        waiting: list[tuple[float, int, socket.socket, bytes]] = []
        number = 0
        with selectors.DefaultSelector() as selector:
            for name, port in ports.items():
                selector.register(port, selectors.EVENT_READ, name)
            while not self._closing.is_set():
                pause = min(max(0.0, waiting[0][0] - time.monotonic()), 0.1) if waiting else 0.1
                for chosen, _ in selector.select(pause):
                    frame, about = ports[chosen.data].recvfrom(1 << 17)
                    to = names.get(frame[DESTINATION])
                    if to is None or about[2] == socket.PACKET_OUTGOING:
                        continue
                    if frozenset((chosen.data, to)) in self.cuts or self._chance.random() < self.loss:
                        self.dropped += 1
                        continue
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + self.latency, number, ports[to], frame))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, _, port, frame = heapq.heappop(waiting)
                    try:
                        port.send(frame)
                    except OSError:  # A full queue loses frames, as a switch does.
                        self.dropped += 1


def _enter(space: int) -> None:
    """Move this thread into a namespace; threads and processes that it starts are there, too."""
    _checked(_libc.setns(space, NEW_NETWORK))


def _checked(answer: int) -> None:
    """Raise OSError if a call of the C library has failed."""
    if answer:
        number = ctypes.get_errno()
        raise OSError(number, f"network namespaces: {os.strerror(number)}")


def _ip(*lines: str) -> None:
    """Run commands of `ip`, here. Raises OSError with what it says."""
    for line in lines:
        done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"ip {line}: {done.stderr.strip()}")
