"""Runs a real Slurm on this machine: munged, slurmctld and four slurmd on loopback, in one directory, ended by pid.

    python tests/support/slurm/lab.py DIRECTORY      # runs until Ctrl-C; prints the SLURM_CONF to export

Every "node" is this machine under another name, so nodes share the address, the file system and the cores. A process
knows its node only by SLURMD_NODENAME. Each node has two typed "GPUs", which are device files that every Linux has.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

NODES = tuple(f"node{i}" for i in range(1, 5))
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
START_TIMEOUT_S = 30.0
NODE_TIMEOUT_S = 10  # after this, a silent node is down

CONF = Path(__file__).with_name("slurm.conf").read_text()


def why_not() -> str | None:
    """Return why this machine cannot run the lab, or None."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"Slurm is not installed ({', '.join(missing)} not found): `make test-slurm` installs it as root"
    if os.geteuid() != 0:
        return "the lab's slurmd must run as root to start jobs: run `make test-slurm` as root"
    return None


class Lab:
    """Starts Slurm on construction, which takes about two seconds. `close` ends every process that it started."""

    def __init__(self, root: Path):
        self.root = root
        self.conf = root / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen] = {}
        for name in ("munge", "state", "spool", "log"):
            (root / name).mkdir(parents=True)
        root.chmod(0o755)
        (root / "munge").chmod(0o700)
        self._write_configuration()
        try:
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.conf))
            for node in NODES:
                self.start_node(node)
            wait_until(lambda: self.states() == dict.fromkeys(NODES, "idle"), "four idle nodes", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None, check: bool = True, timeout_s: float = 30.0
    ) -> str:
        """Return the output of a command in the lab."""
        environment = {**self.environment, **(environment or {})}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        said = f"{command}: exit code {result.returncode}: {result.stdout}{result.stderr}"
        assert not check or result.returncode == 0, said
        return result.stdout.strip()

    def states(self) -> dict[str, str]:
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).splitlines()
        return dict(line.split() for line in lines if len(line.split()) == 2)

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        shown = self.run("scontrol", "show", "job", "--oneliner", job).splitlines()[0]
        return dict(word.partition("=")[::2] for word in shown.split())

    def start_node(self, node: str) -> None:
        (self.root / "spool" / node).mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def kill_node(self, node: str) -> None:
        """Kill slurmd, its steps and their tasks at once, as a power failure does."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        _kill([*self._step_daemons(node), *self.processes_on(node)])
        daemon.wait()

    def processes_on(self, node: str | None = None) -> list[psutil.Process]:
        """Return all processes that jobs of this lab started, on one node or on all nodes."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                gone = process.status() == psutil.STATUS_ZOMBIE
            except (psutil.Error, OSError):
                continue
            name = environment.get("SLURMD_NODENAME")
            mine = environment.get("SLURM_CONF") == str(self.conf) and name and process.name() != "slurmstepd"
            if mine and not gone and node in (None, name):
                found.append(process)
        return found

    def idle(self) -> bool:
        """Return whether no job waits, runs or completes. Otherwise the next job would get other nodes."""
        return not self.run("squeue", "-h", check=False) and not self.processes_on()

    def _step_daemons(self, node: str = "") -> list[psutil.Process]:
        """Return the slurmstepd processes, which have a socket in the node's spool directory."""
        spool, found = str(self.root / "spool" / node), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd" and any(
                    str(c.laddr).startswith(spool) for c in process.net_connections("unix")
                ):
                    found.append(process)
        return found

    def close(self) -> None:
        if "slurmctld" in self._daemons:
            self.run("scancel", "--full", "--state=PENDING,RUNNING,SUSPENDED", check=False)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not self.run("squeue", "-h", check=False), "an empty queue", 15)
        _kill([*self._step_daemons(), *self.processes_on()])
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _write_configuration(self) -> None:
        port, *node_ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=8 RealMemory=8000 "
            "Gres=gpu:h100:2 State=UNKNOWN"
            for name, node_port in zip(NODES, node_ports, strict=True)
        ]
        self.conf.write_text(
            CONF.format(
                root=self.root, port=port, host=host, user="root", node_timeout=NODE_TIMEOUT_S,
                nodes="\n".join(nodes), names=",".join(NODES),
            )
        )  # fmt: skip
        (self.root / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/zero\nName=gpu Type=h100 File=/dev/full\n")
        (self.root / "cgroup.conf").write_text("")

    def _start_munge(self) -> None:
        munge = self.root / "munge"
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._start(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge / 'socket'}",
            f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}",
        )  # fmt: skip
        wait_until((munge / "socket").exists, "munged", START_TIMEOUT_S)

    def _start(self, name: str, *command: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment,
                start_new_session=True,
            )  # fmt: skip


def wait_until(
    condition: Callable[[], object], what: str, timeout_s: float, shown: Callable[[], str] = str, poll_s: float = 0.1
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}\n{shown()}"
        time.sleep(poll_s)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lab = Lab(Path(sys.argv[1]).resolve())
    try:
        print(f"export SLURM_CONF={lab.conf}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        lab.close()


if __name__ == "__main__":
    main()
