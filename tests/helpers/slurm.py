"""A throw-away Slurm cluster of one node with two CPUs, for the tests of the engine: `with SlurmCluster(): ...`.

The daemons of Debian's packages slurm-wlm and munge are started by hand, without systemd, cgroups and accounting. Their
files lie in one folder and their ports are free ones, so that a cluster of the machine itself is not touched. There are
two partitions: jobs in `high` preempt those in `low`, the default.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")
_PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
_CONFIG = """
ClusterName=vitral
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=5
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=60 PriorityTier=1 GraceTime=20
PartitionName=high Nodes={host} MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no cluster on this machine; empty where there can be one."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATHS) is None]
    return f"needs Slurm (apt-get install slurm-wlm munge): no {', '.join(absent)}" if absent else ""


class SlurmCluster:
    """The daemons, from `__enter__` to `__exit__`; SLURM_CONF names the cluster to the programs that are started."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has at most 107 bytes
        self.config = self.folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        ports = {"controller": _free_port(), "daemon": _free_port()}
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        self.config.write_text(_CONFIG.format(host=host, user=user, folder=self.folder, **ports))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(self.config)
        try:
            own = {name: self.folder / f"munge.{name}" for name in ("pid", "log", "seed", "socket")}
            options = {
                "pid-file": own["pid"],
                "log-file": own["log"],
                "seed-file": own["seed"],
                "socket": own["socket"],
            }
            words = [f"--{name}={path}" for name, path in options.items()]
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *words)
            self._wait(own["socket"].exists)
            self._start("slurmctld", "-D", "-f", str(self.config))
            self.start_node()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if "slurmctld" in self._daemons:
            subprocess.run(["scancel", "--full", "--signal=KILL", "--me"], capture_output=True, timeout=30)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if self._before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = self._before
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_node(self) -> None:
        """Start the node, and wait until it takes jobs."""
        self._start("slurmd", "-D", "-f", str(self.config))
        self._wait(lambda: self.run("sinfo", "--noheader", "--format=%T").split()[:1] in (["idle"], ["mixed"]))

    def lose_node(self) -> None:
        """End the node and all that runs on it at once, as a power failure does."""
        slurmd = self._daemons.pop("slurmd")
        for pid in _descendants(slurmd.pid) | _stepds(str(self.folder)):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        slurmd.kill()
        slurmd.wait()

    def run(self, *words: str) -> str:
        """The output of one of Slurm's programs."""
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout

    def queue(self) -> list[str]:
        """Number, name and state of each job that is not over."""
        return self.run("squeue", "--noheader", "--array", "--format=%i %j %T").splitlines()

    def _start(self, program: str, *words: str) -> None:
        path = shutil.which(program, path=_PATHS)
        assert path is not None
        log = (self.folder / f"{program}.out").open("wb")
        with log:
            self._daemons[program] = subprocess.Popen([path, *words], stdout=log, stderr=log)

    def _wait(self, ready: object, seconds: float = 60.0) -> None:
        assert callable(ready)
        deadline = time.monotonic() + seconds
        while not ready():
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, f"{name} has ended: {(self.folder / f'{name}.out').read_text()}"
            assert time.monotonic() < deadline, "the Slurm cluster does not start"
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _descendants(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text("utf-8", "replace")
        except OSError:
            continue
        children.setdefault(int(fields.rpartition(")")[2].split()[1]), set()).add(int(stat.parent.name))
    found: set[int] = set()
    queue = [pid]
    while queue:
        new = children.get(queue.pop(), set()) - found
        found |= new
        queue += new
    return found


def _stepds(folder: str) -> set[int]:
    """The processes of jobs: slurmstepd is no child of slurmd, but the configuration is in its environment."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/comm"):
        try:
            if stat.read_text().startswith("slurmstepd") and folder.encode() in (stat.parent / "environ").read_bytes():
                pid = int(stat.parent.name)
                found |= {pid, *_descendants(pid)}
        except OSError:
            continue
    return found


if __name__ == "__main__":
    with SlurmCluster() as cluster:
        print(f"export SLURM_CONF={cluster.config}", flush=True)
        sys.stdin.read()
