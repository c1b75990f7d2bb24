"""A program whose output is piped ends quietly once its reader has read enough, as `| head` does."""

import os
import signal
import sys
from collections.abc import Callable


def while_read(program: Callable[[], int]) -> int:
    """The program's exit code, or that of a program which SIGPIPE ended where stdout was closed on it.

    For programs that write nothing but their output: where sockets are written too, a broken pipe may be one of those.
    """
    try:
        code = program()
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
