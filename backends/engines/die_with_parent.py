"""`python -IS die_with_parent.py PARENT_PID COMMAND…`: become COMMAND, and die when PARENT dies.

Linux sends the signal when the *thread* that started this process ends, so the supervisor starts it
from a thread that lives as long as the engine may. Elsewhere COMMAND just runs. Standard library
only: it runs before COMMAND's environment is known to work.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, command = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it died before prctl: no signal will come
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv)
