"""Takes from Python what Linux has and macOS has not, in every process whose import path has this folder."""

import ctypes
import os
import pathlib
import socket

for name in [*filter(lambda name: name.startswith(("sched_", "SCHED_")), dir(os)), "pidfd_open", "waitid"]:
    if name != "sched_yield":
        delattr(os, name)

real_library, real_option, real_open = ctypes.CDLL, socket.socket.setsockopt, pathlib.Path.open
no_file = FileNotFoundError(2, "like macOS")


class CLibrary:
    """The C library without the functions of Linux."""

    def __init__(self, name, *args, **kwargs):
        self._library = real_library(name, *args, **kwargs)

    def __getattr__(self, name):
        if name in ("prctl", "timerfd_create", "timerfd_settime"):
            raise AttributeError(name)
        return getattr(self._library, name)


def library(name, *args, **kwargs):
    return (CLibrary if name is None else real_library)(name, *args, **kwargs)


def set_option(self, level, option, *value):
    if (level, option) == (socket.SOL_SOCKET, 35):  # SO_TIMESTAMPNS
        raise OSError(42, "Protocol not available")
    return real_option(self, level, option, *value)


def open_file(self, *args, **kwargs):
    if self.parts[:2] in (("/", "proc"), ("/", "sys")):
        raise no_file
    return real_open(self, *args, **kwargs)


ctypes.CDLL, socket.socket.setsockopt, pathlib.Path.open = library, set_option, open_file
