"""An accounting database for the test bed: MariaDB and slurmdbd, both private to it."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr")
PACKAGES = "slurmdbd mariadb-server"
TIMEOUT_S = 60.0
ACCOUNTS = ("lab", "poor")
"""Accounts of the bed's user; the first is the default."""

CONF = """\
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
DebugLevel=verbose
LogFile={dir}/log/slurmdbd.log
PidFile={dir}/pid/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""
SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={dir}/munge.sock
AccountingStorageEnforce=associations,limits
"""
FIRST_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';
"""

Start = Callable[..., None]


class AccountingError(Exception):
    """The accounting database cannot run on this machine."""


def configure(directory: Path, port: int, database: int, path: str) -> str:
    """Write slurmdbd.conf. Return the lines for slurm.conf. Raises AccountingError."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        raise AccountingError(f"not installed: {', '.join(missing)}: apt-get install {PACKAGES}")
    password = secrets.token_hex(16)
    values = {"dir": directory, "port": port, "database": database, "user": getpass.getuser()}
    for name, text in (("slurmdbd.conf", CONF), ("first.sql", FIRST_SQL)):
        file = directory / name
        file.touch(mode=0o600)
        file.write_text(text.format(password=password, **values))
    (directory / "database.port").write_text(str(database))
    return SLURM_CONF.format(**values)


def is_there(directory: Path) -> bool:
    return (directory / "slurmdbd.conf").exists()


def start(directory: Path, start_daemon: Start) -> None:
    """Start both daemons and enter cluster, accounts and user, before slurmctld starts."""
    data, user = directory / "database", getpass.getuser()
    if not data.exists():
        _run("mariadb-install-db", "--no-defaults", f"--datadir={data}", f"--user={user}")
    port = int((directory / "database.port").read_text())
    start_daemon(
        "mariadbd",
        "--no-defaults",
        f"--datadir={data}",
        f"--user={user}",
        f"--socket={directory}/db.sock",
        f"--pid-file={directory}/pid/mariadbd.pid",
        f"--log-error={directory}/log/mariadbd.log",
        f"--init-file={directory}/first.sql",
        "--bind-address=127.0.0.1",
        f"--port={port}",
        "--innodb-buffer-pool-size=64M",
    )
    _wait_for(port, "mariadbd")
    start_daemon("slurmdbd", "-D")
    lines = (directory / "slurmdbd.conf").read_text().splitlines()
    _wait_for(int(dict(line.split("=", 1) for line in lines)["DbdPort"]), "slurmdbd")
    _run("sacctmgr", "-i", "add", "cluster", "bed")
    for account in ACCOUNTS:
        _run("sacctmgr", "-i", "add", "account", account)
        _run("sacctmgr", "-i", "add", "user", user, f"account={account}")
    _run("sacctmgr", "-i", "modify", "user", user, "set", f"defaultaccount={ACCOUNTS[0]}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    nothing_new = "Already existing" in done.stdout or "Nothing new" in done.stdout
    if done.returncode != 0 and not nothing_new:
        raise AccountingError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def _wait_for(port: int, who: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AccountingError(f"waited {TIMEOUT_S:.0f} s for {who} (pid {os.getpid()})")
