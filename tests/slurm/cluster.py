"""A Slurm of two virtual nodes for the tests: its daemons, and what a user does with it.

Everything is its own: configuration, key, sockets, ports and state lie in a temporary folder, and
commands find them by the environment, so that a Slurm which serves this machine is not touched.
Both nodes are this machine under two names. Memory and cores are not shared out: Slurm is told
that there are enough of them.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.ranks import free_port

NODES = ("wlb1", "wlb2")
TAG = "WLB_SLURM_TEST"
"""A variable in the environment of everything that a cluster runs, so that it can be found."""
DAEMONS = ("munged", "slurmctld", "slurmd")

CONFIGURATION = """
ClusterName=wlb
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
# A node that is dead is found soon, and serves again as soon as it is back.
SlurmdTimeout=10
ReturnToService=2
KillWait=30
OverTimeLimit=0
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=8 \
RealMemory=4096 State=UNKNOWN
PartitionName=test Nodes={nodes} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why there can be no cluster here, empty if there can."""
    absent = [name for name in (*DAEMONS, "sbatch") if _program(name) is None]
    return f"slurm is not installed: {', '.join(absent)} not found" if absent else ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """A running Slurm; :func:`running` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = socket.gethostname().split(".")[0]
        self.outside = {n: value for n, value in os.environ.items() if not _from_slurm(n)}
        self.environment = {
            **self.outside,
            "SLURM_CONF": str(folder / "slurm.conf"),
            TAG: str(folder),
            # Names of virtual nodes are known to Slurm only.
            "MASTER_ADDR": "127.0.0.1",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes can take a job."""
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        first = _two_ports()
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=self.host,
                user=pwd.getpwuid(os.getuid()).pw_name,
                nodes=f"{NODES[0]},{NODES[1]}",
                ports=(free_port(), first, first + 1),
            )
        )
        self._start(
            "munged",
            "munged",
            "--force",
            "--foreground",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )
        wait_until(lambda: (self.folder / "munge.socket").exists(), 20, "munged does not answer")
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start a node, or start it again, and wait until it can take a job."""
        self._start(node, "slurmd", "-D", "-N", node)
        wait_until(lambda: self.state_of(node) == "idle", 60, f"{node} does not come up")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = _program(program)
        with open(self.folder / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                [path, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End all jobs and daemons, and whatever is left of them."""
        with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            self.run("scancel", "--signal=KILL", "--full", f"--user={os.getuid()}")
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        for pid in self.processes():
            _kill(pid)
        for daemon in self.daemons.values():
            daemon.wait(10)

    # What a user does

    def run(self, *command: str, seconds: float = 60, **options: object) -> str:
        """What a command of Slurm prints.

        Raises:
            subprocess.CalledProcessError: if it fails.
        """
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
            **options,
        )
        return done.stdout.strip()

    def state_of(self, node: str) -> str:
        """Slurm's word for a node's state, such as ``idle`` or ``down*``; empty for no answer."""
        try:
            return self.run("sinfo", "--noheader", f"--nodes={node}", "--format=%t")
        except subprocess.CalledProcessError:
            return ""

    def submit(self, *arguments: str, cwd: Path, **environment: str) -> str:
        """The number of a batch job that is given these arguments of sbatch."""
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env={**self.environment, **environment},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> Mapping[str, str]:
        """What ``scontrol show job`` says: ``JobState``, ``Restarts``, ``ExitCode``, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(
        self, number: str, *states: str, seconds: float = 180, hurry: bool = True
    ) -> Mapping[str, str]:
        """Wait for one of these states; the job then.

        A requeued job is held back for two minutes by Slurm, which are cut short in a hurry.
        """
        deadline = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{job['JobState']}, not {states}: {job}"
            if hurry and job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
                self.run("scontrol", "update", f"jobid={number}", "StartTime=now")
            time.sleep(0.2)
        return job

    def said(self) -> str:
        """The end of the controller's log, for messages of assertions."""
        return "\n".join((self.folder / "slurmctld.log").read_text().splitlines()[-60:])

    def processes(self, *marks: str) -> list[int]:
        """What the cluster has started and still runs, and has these ``NAME=value`` too."""
        return list(_marked(f"{TAG}={self.folder}", *marks))

    def kill_node(self, node: str) -> None:
        """What a power cut does: kill the node's daemon, and all that it has started, at once."""
        tasks = self.processes(f"SLURMD_NODENAME={node}")
        # The keepers of steps first, or they would still report that their tasks have ended.
        keepers = {_parent(pid) for pid in tasks} - {*tasks}
        self.daemons[node].kill()
        for pid in [*(pid for pid in keepers if _name(pid) == "slurmstepd"), *tasks]:
            _kill(pid)
        self.daemons[node].wait(10)


def _two_ports() -> int:
    """The first of two free ports next to each other."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", first + 1))
            return first


def _from_slurm(name: str) -> bool:
    """Variables that a Slurm job, sbatch's defaults or an earlier run would set."""
    return name.startswith(("SLURM_", "SBATCH_", "SRUN_")) or name in ("MASTER_ADDR", "MASTER_PORT")


def _marked(*marks: str) -> Iterator[int]:
    wanted = {mark.encode() for mark in marks}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted <= {*(folder / "environ").read_bytes().split(b"\0")}:
                    yield int(folder.name)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("PPid:"):
                return int(line.split()[1])
    return 0


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until(true: Callable[[], object], seconds: float, message: str) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: with the message, if it is not within the time.
    """
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, message
        time.sleep(0.2)


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """A cluster, and the end of it."""
    # Not pytest's folder: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="wlb-slurm-"))
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)
