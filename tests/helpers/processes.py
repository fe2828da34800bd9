"""Start the processes of one run on this machine."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def free_port():
    """Return a port that is free, and its successor too."""
    for port in range(20_000 + os.getpid() % 10_000, 60_000, 7):
        servers = (socket.create_server(("127.0.0.1", p)) for p in (port, port + 1))
        with contextlib.suppress(OSError), next(servers), next(servers):
            return port
    raise RuntimeError("no free port")


class Processes:
    """The processes of a run, each with `devices` devices of its CPU, in a folder."""

    def __init__(self, line, num, folder, devices=1, options=(), addresses=None, module="jaxrl_fast.train"):
        self.port, self.started, self.files = free_port(), [], []
        # One process sums in shared memory, and several by XLA's sum, around which XLA rounds differently. So it does
        # with the compiler flags of conftest.py, which optimize less.
        kernels = "dense,conv,layer_norm,batch_norm,host_call"
        environ = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAXRL_FAST_KERNELS": kernels, "XLA_FLAGS": ""}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(folder), os.environ.get("PYTHONPATH"))))
        for i in range(num):
            address = addresses[i] if addresses else f"127.0.0.1:{self.port},{num},{i}"
            own = [*line.split(), *(options[i].split() if options else ())]
            own += ["--distributed", address.format(port=self.port)] if num > 1 or addresses else []
            self.files.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - read when it has ended
            self.started.append(
                subprocess.Popen(
                    [sys.executable, "-u", "-m", module, *own],
                    stdout=self.files[-1], stderr=subprocess.STDOUT, env=environ, cwd=folder,
                )
            )  # fmt: skip

    def text(self, i):
        """Return what a process has printed so far, without the lines of Gloo."""
        if self.files[i].closed:
            return self.texts[i]
        self.files[i].seek(0)
        return "".join(line for line in self.files[i] if "[Gloo]" not in line)

    def until(self, words, i=0):
        """Wait until a process has printed these words."""
        end = time.monotonic() + LIMIT_S
        while words not in self.text(i):
            assert time.monotonic() < end and self.started[i].poll() is None, self.text(i)
            time.sleep(0.05)

    def wait(self, limit=LIMIT_S):
        """Return the exit statuses; kill the processes if they take longer."""
        end = time.monotonic() + limit
        try:
            return [process.wait(max(end - time.monotonic(), 0.1)) for process in self.started]
        finally:
            for process in self.started:
                process.kill()
                process.wait()
            self.texts = [self.text(i) for i in range(len(self.files))]
            for file in self.files:
                file.close()


def run(line, num, folder, **others):
    """Run the processes to their end, and return the text of process 0; all must end well."""
    processes = Processes(line, num, folder, **others)
    assert processes.wait() == [0] * num, [processes.text(i) for i in range(num)]
    return processes.text(0)
