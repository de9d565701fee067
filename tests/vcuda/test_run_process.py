"""The life of a run: exit codes, signals, terminals, and a booking that ends with the process tree, however it ends."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import Runner, alive, wait_for, wait_for_keeper
from vcuda import sim

# Ends with status 5 at a signal. Not by a handler and a sleep: a signal that comes after Python's last look for signals and
# before the system call is handled when the sleep is over.
WAITS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [{0}])
print('ready', flush=True)
signal.sigwait([{0}])
raise SystemExit(5)
"""
SLEEP = "import time; print('ready', flush=True); time.sleep(300)"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "machine"
    card = sim.SimCard(memory_bytes=8 * 2**30)
    sim.Machine.create(folder, [card, card])
    return folder


@pytest.fixture
def vcuda(machine: Path) -> Iterator[Runner]:
    runner = Runner(machine)
    yield runner
    wait_for("the end of every booking", lambda: not runner.bookings())


def child_of(pid: int) -> int:
    """The only child process."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(wait_for(f"a child of {pid}", lambda: children.read_text().split())[0])


def family(runner: Runner, command: list[str]) -> tuple[subprocess.Popen[str], int, int]:
    """A run whose command said "ready": the front, and the process IDs of its supervisor and its command."""
    front = runner.start(*runner.run(*command))
    assert front.stdout is not None
    assert front.stdout.readline().strip() == "ready"
    supervisor = wait_for_keeper(child_of(front.pid))
    return front, supervisor, child_of(supervisor)


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137), ("kill -PIPE $$", 141)],
)
def test_the_run_ends_as_its_command_ends(vcuda: Runner, script: str, status: int) -> None:
    result = vcuda.call(*vcuda.run("sh", "-c", script))
    assert (result.returncode, result.stdout, result.stderr) == (status, "", "")
    assert vcuda.entries() == []


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("/no/such/program", 127, "No such file"),
        ("no-such-program", 127, "No such file"),
        ("/etc/passwd", 126, "Permission"),
    ],
)
def test_a_command_that_cant_be_executed(vcuda: Runner, command: str, status: int, text: str) -> None:
    result = vcuda.call(*vcuda.run(command))
    assert result.returncode == status
    assert result.stderr.startswith(f"vcuda: can't execute '{command}': {text}")
    assert len(result.stderr.splitlines()) == 1
    assert vcuda.entries() == []


def test_the_command_gets_its_input_its_output_and_our_variables(vcuda: Runner) -> None:
    show = 'cat; echo "$LD_LIBRARY_PATH"; echo "$CUDA_VISIBLE_DEVICES"; echo err >&2; ls /proc/$$/fd'
    front = vcuda.start(*vcuda.run("sh", "-c", show), stdin=subprocess.PIPE)
    out, err = front.communicate("hello\n", timeout=60)
    hello, paths, visible, *descriptors = out.splitlines()
    libraries = Path(paths.split(":")[0])
    assert hello == "hello" and err == "err\n"
    assert libraries.name == "lib64" and libraries.parent.parent == vcuda.ledger
    assert visible in [card.uuid for card in sim.Machine(vcuda.machine).cards]
    assert [number for number in descriptors if int(number) > 2 and int(number) < 200] in ([], ["3"])


def test_the_users_own_library_path_comes_after_ours(vcuda: Runner) -> None:
    result = vcuda.call(*vcuda.run("sh", "-c", 'echo "$LD_LIBRARY_PATH"'), LD_LIBRARY_PATH="/opt/mine:/opt/yours")
    ours, *rest = result.stdout.strip().split(":")
    assert ours.startswith(str(vcuda.ledger))
    assert rest[-2:] == ["/opt/mine", "/opt/yours"]


def test_another_choice_of_cards_is_replaced_and_said(vcuda: Runner) -> None:
    result = vcuda.call(*vcuda.run("true"), CUDA_VISIBLE_DEVICES="1")
    assert result.returncode == 0
    assert "CUDA_VISIBLE_DEVICES is replaced" in result.stderr


def test_the_folder_holds_copies_of_the_shims_and_links_to_the_driver(vcuda: Runner) -> None:
    front, _, _ = family(vcuda, [sys.executable, "-c", SLEEP])
    (entry,) = vcuda.bookings()
    libraries = Path(entry.folder) / "lib64"
    driver = sim.Machine(vcuda.machine).library_folder
    for name in ("libcuda", "libnvidia-ml"):
        assert (libraries / f"{name}.so.1").is_file() and not (libraries / f"{name}.so.1").is_symlink()
        assert str((libraries / f"{name}.so").readlink()) == f"{name}.so.1"
        assert (libraries / "drv" / f"{name}-driver.so.1").resolve() == (driver / f"{name}.so.1").resolve()
    assert {path.name for path in (libraries.parent / "vcuda").iterdir()} == {"limits", "usage"}
    front.terminate()
    assert front.wait(30) == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(vcuda: Runner, number: signal.Signals) -> None:
    front, _, _ = family(vcuda, [sys.executable, "-c", WAITS.format(int(number))])
    front.send_signal(number)
    assert front.wait(30) == 5


def test_a_signal_before_the_keeper_listens_reaches_the_command(vcuda: Runner) -> None:
    front, supervisor, _ = family(vcuda, [sys.executable, "-c", WAITS.format(int(signal.SIGUSR1))])
    os.kill(supervisor, signal.SIGSTOP)
    front.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        front.wait(0.3)
    os.kill(supervisor, signal.SIGCONT)
    assert front.wait(30) == 5


def test_the_interrupt_key_reaches_the_command_once(vcuda: Runner) -> None:
    script = (
        "import signal, time\ncount = []\n"
        "signal.signal(signal.SIGINT, lambda *_: count.append(1))\n"
        "print('ready', flush=True)\n"
        "while not count: time.sleep(0.05)\n"
        "time.sleep(0.5)\nprint('interrupts', len(count), flush=True)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        words = vcuda.words(*vcuda.run(sys.executable, "-c", script))
        os.execve(words[0], words, vcuda.environment())
    heard = b""
    while b"ready" not in heard:
        heard += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    while b"interrupts" not in heard:
        heard += os.read(terminal, 1000)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert b"interrupts 1" in heard
    assert os.waitstatus_to_exitcode(status) == 0


def test_killing_the_front_leaves_command_and_booking_alone(vcuda: Runner) -> None:
    front, supervisor, command = family(vcuda, [sys.executable, "-c", SLEEP])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # as a session's end would
        os.kill(supervisor, number)
    front.kill()
    front.wait(30)
    assert alive(supervisor) and alive(command) and len(vcuda.bookings()) == 1
    os.kill(command, signal.SIGKILL)
    wait_for("the supervisor's end", lambda: not alive(supervisor))
    assert vcuda.entries() == []


def test_killing_the_keeper_leaves_command_exit_status_and_booking(vcuda: Runner) -> None:
    script = "print('ready', flush=True); input(); raise SystemExit(9)"
    front = vcuda.start(*vcuda.run(sys.executable, "-c", script), stdin=subprocess.PIPE)
    assert front.stdout is not None and front.stderr is not None
    front.stdout.readline()
    supervisor = wait_for_keeper(child_of(front.pid))
    command = child_of(supervisor)
    os.kill(supervisor, signal.SIGKILL)
    wait_for("adoption by the front", lambda: child_of(front.pid) == command)
    assert len(vcuda.bookings()) == 1
    _, err = front.communicate("\n", timeout=60)
    assert front.returncode == 9
    assert "supervisor of this run was killed" in err
    assert vcuda.entries() == []


def test_killing_everything_ends_the_booking_and_the_next_run_cleans_up(vcuda: Runner) -> None:
    front, supervisor, command = family(vcuda, [sys.executable, "-c", SLEEP])
    for pid in (front.pid, supervisor):
        os.kill(pid, signal.SIGKILL)
    front.wait(30)
    assert len(vcuda.bookings()) == 1, "the command still holds it"
    os.kill(command, signal.SIGKILL)
    wait_for("the end of the booking", lambda: not vcuda.bookings())
    assert len(vcuda.entries()) == 1, "nobody was left to clean up"
    assert vcuda.call(*vcuda.run("true")).returncode == 0
    assert vcuda.entries() == []


def test_a_daemon_that_closed_all_its_files_keeps_the_share(vcuda: Runner, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import os, time\n"
        "if os.fork(): os._exit(3)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        f"open({str(note)!r}, 'w').write(str(os.getpid()) + '.')\n"
        "os.closerange(0, 4096)\n"
        "time.sleep(300)"
    )
    reading, writing = os.pipe()
    front = vcuda.start(*vcuda.run(sys.executable, "-c", script), pass_fds=(writing,))
    os.close(writing)
    _, err = front.communicate(timeout=60)
    assert front.returncode == 3, "the run ends with its command, and nothing waits for the daemon's stdout"
    assert "keep the share until they end" in err
    daemon = int(
        wait_for(
            "the daemon's note",
            lambda: note.exists() and note.read_text().endswith(".") and note.read_text()[:-1],
        )
    )
    wait_for("the daemon to close its files", lambda: not list(Path(f"/proc/{daemon}/fd").iterdir()))
    readable, _, _ = select.select([reading], [], [], 30)
    assert readable and os.read(reading, 1) == b"", "the supervisor holds back no file that it inherited"
    os.close(reading)
    assert len(vcuda.bookings()) == 1
    os.kill(daemon, signal.SIGKILL)
    wait_for("the end of the booking", lambda: not vcuda.entries())


def test_a_second_run_takes_over_the_arbiter(vcuda: Runner) -> None:
    arbiter = vcuda.ledger / f"arbiter-{os.geteuid()}"

    def holders() -> list[int]:
        mark = f":{arbiter.stat().st_ino}" if arbiter.exists() else ":none"
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [int(line[4]) for line in lines if line[5].endswith(mark)]

    first, first_keeper, first_command = family(vcuda, [sys.executable, "-c", SLEEP])
    wait_for("an arbiter", lambda: holders() == [first_keeper])
    second, second_keeper, second_command = family(vcuda, [sys.executable, "-c", SLEEP])
    assert holders() == [first_keeper]
    os.kill(first_keeper, signal.SIGKILL)
    wait_for("the takeover", lambda: holders() == [second_keeper])
    for front, command in ((first, first_command), (second, second_command)):
        os.kill(command, signal.SIGKILL)
        assert front.wait(30) == 137


def test_a_run_inside_a_run_is_refused(vcuda: Runner) -> None:
    inner = vcuda.words(*vcuda.run("true"))
    result = vcuda.call(*vcuda.run(*inner))
    assert result.returncode == 125
    assert "inside the run run-" in result.stderr
