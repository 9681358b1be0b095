"""Commands that `processes.py` runs in other processes, by this file's path. Standard library only.

    child.py guard                       stdin: "+GROUP", "-GROUP"; at its end all are killed
    child.py limited LIMITS COMMAND…     rlimits, then COMMAND in this process
    child.py limited LIMITS -c SOURCE    rlimits, then SOURCE in this interpreter
    child.py reaper JOB COMMAND…         COMMAND in a session of its own, bounded; see `reap`

LIMITS is `CPU=5:6,AS=536870912`: soft and hard limits by the names of `resource.RLIMIT_…`.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time


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


BETWEEN_LOOKS_S = 0.5
"""Seconds between two looks at what a job uses."""
MOST_LOOKED_AT = 1 << 16
"""Processes that one look finds at most: it may not go on as long as they fork."""
SUBREAPER = 36
"""`PR_SET_CHILD_SUBREAPER`: orphans become children of this process, whatever session they
opened."""


def reap(job: str, command: list[str]) -> None:
    """Run `command` until it ends, stdin ends (the owner wants it to, or has died) or it exceeds a
    bound; then kill all that it has started, and say on stdout, as JSON, how it ended.

    `job`: JSON of `log` (file that its output goes to), `limits`, `bounds`, `folders` (whose
    content counts), and `after` (a command that is run at the end, with this environment, for
    `after_s` at most).
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked = json.loads(job)
    subreaper()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    failed, fails = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            limit(asked["limits"])
            os.execvp(command[0], command)
        except BaseException as e:  # noqa: BLE001 - told by the parent
            os.write(fails, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(127)
    os.close(fails)
    if error := os.read(failed, 4096):
        os.waitpid(pid, 0)
        ended: dict[str, object] = {"how": "unstarted", "detail": error.decode(errors="replace")}
    else:
        ended = watch(pid, woken, log, asked["bounds"], asked["folders"])
    end_descendants(pid)
    if asked["after"]:
        try:
            subprocess.run(
                asked["after"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=asked["after_s"],
            )
        except (OSError, subprocess.TimeoutExpired) as e:  # a daemon that hangs: the owner waits
            os.write(log, f"{type(e).__name__}: {e}\n".encode())
        end_descendants(pid)
    try:
        os.write(1, json.dumps(ended).encode())
    except BrokenPipeError:  # the owner has died
        return


def watch(
    pid: int, woken: int, log: int, bounds: dict[str, int], folders: list[str]
) -> dict[str, object]:
    """Wait for the end of the process; return it, or why it has to end."""
    look_at = time.monotonic() + BETWEEN_LOOKS_S
    while True:
        try:
            while os.read(woken, 512):
                continue
        except BlockingIOError:
            pass
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == pid:
                code = os.waitstatus_to_exitcode(found[1])
                excess = exceeded(log, bounds, folders)  # what it wrote last
                if excess:
                    return {"how": "bound", "detail": excess}
                return {"how": "exited" if code >= 0 else "signal", "code": abs(code)}
        readable = select.select([0, woken], [], [], max(0.0, look_at - time.monotonic()))[0]
        if 0 in readable:
            return {"how": "stopped"}
        if (began := time.monotonic()) >= look_at:
            if excess := exceeded(log, bounds, folders):
                return {"how": "bound", "detail": excess}
            # Large folders are looked at less often: a tenth of the time at most.
            took = time.monotonic() - began
            look_at = time.monotonic() + max(BETWEEN_LOOKS_S, 9 * took)


def exceeded(log: int, bounds: dict[str, int], folders: list[str]) -> str:
    """The first bound that is exceeded; empty: none is."""
    used = {"output": os.fstat(log).st_size}
    if bounds.keys() & {"disk", "files"}:
        used["disk"], used["files"] = contents(folders, bounds.get("files"))
    if bounds.keys() & {"cpu_s", "memory", "processes"}:
        used["processes"], used["memory"], used["cpu_s"] = consumption()
    for name, most in bounds.items():
        if used.get(name, 0) > most:
            of = {"disk": " bytes", "memory": " bytes", "output": " bytes", "cpu_s": " s"}
            return f"{name}: {used[name]} of {most}{of.get(name, '')}"
    return ""


def contents(folders: list[str], most_files: int | None) -> tuple[int, int]:
    """Bytes on disk, and entries, of these folders; no more of them than that are counted."""
    size = n = 0
    left = list(folders)
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    n += 1
                    try:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    except OSError:  # gone meanwhile; the rest of the folder is not
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    if most_files is not None and n > most_files:
                        return size, n
        except OSError:  # gone meanwhile
            continue
    return size, n


def consumption() -> tuple[int, int, int]:
    """Processes, resident bytes and CPU seconds of all descendants, the ended ones included."""
    import resource

    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    live = descendants()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = ended.ru_utime + ended.ru_stime
    cpu += sum(sum(map(int, fields[11:15])) for fields in live.values()) / tick
    return len(live), sum(int(fields[21]) for fields in live.values()) * page, int(cpu)


def descendants() -> dict[int, list[str]]:
    """`/proc/PID/stat` behind the name, by PID, of all processes below this one that are no
    zombies."""
    stats: dict[int, list[str]] = {}
    for pid in candidates():
        try:
            # The name may be cut in the middle of a character, or be any bytes.
            with open(f"/proc/{pid}/stat", "rb") as file:
                stats[pid] = file.read().rpartition(b")")[2].decode().split()
        except OSError:
            continue
    below: set[int] = set()
    above = {os.getpid()}
    while above:
        above = {pid for pid, fields in stats.items() if int(fields[1]) in above} - below
        below |= above
    return {pid: stats[pid] for pid in below if stats[pid][0] != "Z"}


def candidates() -> list[int]:
    """PIDs among which are all descendants: by the kernel's lists of children, one a thread, since
    a machine may have thousands of other processes. Without such lists, all."""
    found = [os.getpid()]
    for pid in found:  # grows meanwhile
        if len(found) > MOST_LOOKED_AT:
            break
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:  # it has ended; or macOS
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
            except OSError:
                if pid == os.getpid():  # a kernel without CONFIG_PROC_CHILDREN
                    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return found


def end_descendants(leader: int) -> None:
    """Kill all that is left. A fork may outrun one look, so none is the last as long as there is a
    child."""
    while True:
        for pid in (leader, *descendants()):
            try:
                if pid == leader:
                    os.killpg(leader, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.01)


def subreaper() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard()
    elif sys.argv[1] == "reaper":
        reap(sys.argv[2], sys.argv[3:])
    else:
        limited(sys.argv[2], sys.argv[3:])
