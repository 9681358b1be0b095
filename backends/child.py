"""Commands that `processes.py` runs in other processes, by this file's path. Standard library only.

    child.py guard                       stdin: "+GROUP", "-GROUP"; at its end all are killed
    child.py limited LIMITS COMMAND…     rlimits, then COMMAND in this process
    child.py limited LIMITS -c SOURCE    rlimits, then SOURCE in this interpreter

LIMITS is `CPU=5:6,AS=536870912`: soft and hard limits by the names of `resource.RLIMIT_…`.
"""

import os
import signal
import sys


def guard() -> None:
    """Kill the process groups that are left when the parent has ended, however that ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of a terminal, or a service's stop: the parent ends
    groups: set[int] = set()
    while line := sys.stdin.buffer.readline():
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def limit(limits: str) -> None:
    import resource

    for entry in filter(None, limits.split(",")):
        name, _, values = entry.partition("=")
        soft, _, hard = values.partition(":")
        what = getattr(resource, f"RLIMIT_{name}")
        most, wanted = resource.getrlimit(what)[1], int(hard or soft)
        wanted = wanted if most < 0 else min(wanted, most)
        resource.setrlimit(what, (min(int(soft), wanted), wanted))


def limited(limits: str, command: list[str]) -> None:
    if os.getpid() == 1:  # signals that are not handled do not end the first of a namespace
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
    limit(limits)
    if command[0] != "-c":
        os.execvp(command[0], command)
    sys.argv[:] = ["-c", *command[2:]]
    exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard()
    else:
        limited(sys.argv[2], sys.argv[3:])
