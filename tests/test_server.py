"""The server from which the processes of trials are forked."""

import os
import signal

from tests import run_here


def test_ctrl_c_does_not_reach_the_server_while_it_imports(tmp_path):
    """Ctrl-C would reach every process of the terminal, and the server print a
    traceback.
    """
    program = (
        "import signal\n"
        "from multiprocessing import forkserver\n"
        "from determined_amp.search import server as command\n"
        "command.PRELOADED = ['takes_long']\n"
        "command.start_server()\n"
        "server = forkserver._forkserver._forkserver_pid\n"
        "print(open(f'/proc/{server}/status').read())\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    (tmp_path / "takes_long.py").write_text("import time; time.sleep(1)")
    done = run_here.outcome(
        "-c", program, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    (ignored,) = (
        line for line in done.stdout.splitlines() if line.startswith("SigIgn:")
    )
    assert int(ignored.split()[1], 16) & 1 << signal.SIGINT - 1
