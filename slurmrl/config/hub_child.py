"""The child process that fetches a repository.

The process downloads one commit into ``<home>/fetching``, or resumes an interrupted download. From
the download, the process makes the folder ``<home>/<commit>.<pid>`` and renames the folder to
``<home>/<commit>``. ``<home>/<commit>.json`` lists the files of the folder. The library shows its
progress on stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from slurmrl import child
from slurmrl.config.hub import HubKind, HubReference, damage, record
from slurmrl.errors import EnvironmentFailure, MissingDependencyError, UsageError
from slurmrl.fsio import atomic

TIMEOUT_S: Final = 30.0
TRY_S: Final = 0.1
"""Seconds to try to get the lock before the process prints that it waits."""
OF_TOKENIZERS: Final = (
    *("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "chat_template*"),
    *("special_tokens_map.json", "added_tokens.json", "config.json"),
)
PATTERNS: Final = {
    HubKind.TOKENIZER: OF_TOKENIZERS,
    HubKind.MODEL: (*OF_TOKENIZERS, "*.json", "*.safetensors"),
}
"""Mapping from a kind of repository to patterns of files to fetch; datasets are fetched whole."""
LEFT_OUT: Final = ("*/*", "consolidated*.safetensors")
"""Patterns of files that repeat the weights in a different format and are not fetched."""
SIGN_IN: Final = "set HF_TOKEN, or sign in with: hf auth login"


class RepositoryFetcher:
    """Fetches one commit of a repository.

    Methods raise UsageError if the repository cannot be used, EnvironmentFailure if the folder
    cannot be written.
    """

    def __init__(self, reference: HubReference, home: Path) -> None:
        from huggingface_hub import constants

        self._reference = reference
        self._home = home
        self._type = "dataset" if reference.kind is HubKind.DATASET else "model"
        self._endpoint = constants.ENDPOINT

    def fetch(self) -> str:
        """Make the folder of the revision's newest commit unless complete; return the commit."""
        import filelock
        from huggingface_hub import HfApi
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        reference = self._reference
        info = HfApi().repo_info(
            reference.repository,
            repo_type=self._type,
            revision=reference.revision,
            timeout=TIMEOUT_S,
        )
        commit = str(info.sha)
        target = self._home / commit
        if not damage(target):
            return commit
        made, lock = self._home / f"{commit}.{os.getpid()}", self._home / "lock"
        self._home.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:  # Processes share the download of a repository.
            try:
                stack.enter_context(WeakFileLock(lock, timeout=TRY_S))
            except filelock.Timeout:
                print(f"waiting for another process that downloads {self._url}", file=sys.stderr)
                stack.enter_context(WeakFileLock(lock))
            lock.chmod(0o600)
            if damage(target):  # Another process may have fetched the folder.
                try:
                    self._make(commit, made)
                    self._publish(made, target)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
                atomic.sync_directory(self._home)
                shutil.rmtree(self._home / "fetching", ignore_errors=True)
        return commit

    def _publish(self, made: Path, target: Path) -> None:
        """Move a folder to its place; replace a folder there that has lost files.

        Runs that have opened files of the replaced folder can continue to read them.
        """
        record(made, target)
        old = made.with_name(f"{made.name}.old")
        with suppress(FileNotFoundError):
            os.rename(target, old)
        try:
            os.rename(made, target)
        except OSError:
            if damage(target):  # Another process may have made the same folder.
                raise
        shutil.rmtree(old, ignore_errors=True)

    def _make(self, commit: str, made: Path) -> None:
        from huggingface_hub import snapshot_download

        reference = self._reference
        patterns = list(PATTERNS.get(reference.kind, ()))
        snapshot = snapshot_download(
            reference.repository,
            repo_type=self._type,
            revision=commit,
            allow_patterns=patterns or None,
            ignore_patterns=list(LEFT_OUT) if patterns else None,
        )
        if reference.kind is HubKind.DATASET:
            self._save_rows(snapshot, made)
        else:
            self._copy(Path(snapshot), made)
        for path in made.rglob("*"):
            if path.is_file():
                atomic.sync_file(path)

    def _copy(self, snapshot: Path, made: Path) -> None:
        names = sorted(path.name for path in snapshot.iterdir() if path.is_file())
        weights = [name for name in names if name.endswith(".safetensors")]
        if self._reference.kind is HubKind.MODEL and not weights:
            raise UsageError(f"{self._url} has no *.safetensors: its weights cannot be read")
        made.mkdir(parents=True)
        for name in names:
            source = os.path.realpath(snapshot / name)
            try:
                os.link(source, made / name)
            except OSError:  # The file system supports no hard links.
                shutil.copyfile(source, made / name)

    def _save_rows(self, snapshot: str, made: Path) -> None:
        """Load the subset with the library ``datasets``, and save its splits to a folder."""
        try:
            import datasets
        except ImportError as error:
            message = f"{self._url}: needs the package datasets: pip install datasets pyarrow"
            raise MissingDependencyError(message) from error
        subset = self._reference.subset
        try:
            known = datasets.get_dataset_config_names(snapshot)
            if subset is None and len(known) > 1 and "default" not in known:
                message = f"has the subsets {', '.join(known)}: set dataset.subset to one of them"
                raise UsageError(f"{self._url} {message}")
            if subset is not None and subset not in known:
                raise UsageError(f"{self._url} has no subset '{subset}'; it has {', '.join(known)}")
            datasets.load_dataset(snapshot, subset).save_to_disk(made)
        except UsageError:
            raise
        except (ValueError, RuntimeError, FileNotFoundError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"{self._url} cannot be read as a dataset: {reason}") from error

    @property
    def _url(self) -> str:
        """Address of the repository's web page."""
        folder = "datasets/" if self._type == "dataset" else ""
        return f"{self._endpoint}/{folder}{self._reference.repository}"

    def explained(self) -> dict[str, str]:
        """Fetch the commit; return a reply with ``commit``, ``unreachable`` or ``error``."""
        import httpx2
        from huggingface_hub import errors

        reference, what = self._reference, self._type
        try:
            return {"commit": self.fetch()}
        except errors.GatedRepoError:
            message = f"{self._url} is gated: accept its conditions there, then {SIGN_IN}"
        except errors.RevisionNotFoundError:
            message = f"{self._url} has no branch, tag or commit '{reference.revision}'"
        except errors.RepositoryNotFoundError:
            message = f"{self._url} does not exist, or is a private {what}: {SIGN_IN}"
        except (
            errors.OfflineModeIsEnabled,
            errors.LocalEntryNotFoundError,
            httpx2.TransportError,
        ) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"{self._url} cannot be reached from here ({reason})"
            return {"unreachable": message}
        except errors.HfHubHTTPError as error:
            reason = str(error).splitlines()[0]
            message = f"{self._url} cannot be fetched: {reason}"
            if error.response.status_code >= 500:
                return {"unreachable": message}
        except (UsageError, EnvironmentFailure, MissingDependencyError) as error:
            message = str(error)
        except OSError as error:
            message = f"{self._url} cannot be fetched to {self._home}: {error}"
        return {"error": message}


def replies(request: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the reply to a request: a reference's fields, and ``home``, the target folder."""
    os.umask(0o077)
    values = {key: value for key, value in request.items() if key != "home"}
    reference = HubReference(**{**values, "kind": HubKind(values["kind"])})
    yield RepositoryFetcher(reference, Path(request["home"])).explained()


if __name__ == "__main__":
    child.answer(replies)
