"""The image without Docker: runs the Dockerfile's own steps, and processes as a container would."""

import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
HEALTHY_S_MAX = 30.0
STOP_S_MAX = 8.0


class Step(NamedTuple):
    """An instruction of the Dockerfile: its word, its --flags, and what follows."""

    word: str
    flags: dict[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        """The exec form's words, or else those of the plain form."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


def read_dockerfile() -> list[Step]:
    """All instructions, without comments and with their lines joined."""
    lines = (PROJECT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    steps = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, rest = line.split(None, 1)
            flags = {}
            while match := re.match(r"--([\w-]+)=(\S+)\s+", rest):
                flags[match[1]] = match[2]
                rest = rest[match.end() :]
            steps.append(Step(word, flags, rest.strip()))
    return steps


STEPS = read_dockerfile()


def steps(word: str) -> list[Step]:
    """All instructions of that word."""
    return [step for step in STEPS if step.word == word]


def declared_environment() -> dict[str, str]:
    """What ENV sets, as it is written."""
    words = [word for step in steps("ENV") for word in step.words]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


class Image:
    """What the Dockerfile's steps make, below `root` where a container has `/`."""

    def __init__(self, root: Path, base: Path) -> None:
        self.root = root
        self.environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        self._build_path = f"{base}:/usr/bin:/bin"
        self._folder = root
        self.wheels = root.with_name("wheels")

    def build(self) -> None:
        """Take the steps in their order; raises `CalledProcessError` when one fails."""
        self.root.mkdir()
        for step in STEPS:
            if step.word == "FROM" and self._folder != self.root:
                # The last stage gets what it copies from the first one, and nothing else.
                shutil.copytree(self._folder / "dist", self.wheels)
                shutil.rmtree(self._folder)
                self._folder = self.root
            elif step.word == "WORKDIR":
                self._folder = Path(self._inside(step.text))
                self._folder.mkdir(parents=True)
            elif step.word == "COPY":
                self._copy(step)
            elif step.word == "RUN":
                self._run(step)
            elif step.word == "ENV":
                for name, value in declared_environment().items():
                    inside = re.sub(r"(?:(?<=:)|^)/", f"{self.root}/", value)
                    path = self.environment["PATH"]
                    self.environment[name] = inside.replace("$PATH", path)
        # A container's working folder is `/`, and its root file system is read-only.
        self.root.chmod(0o555)

    def _inside(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(?=\w)", f"{self.root}/", text)

    def _copy(self, step: Step) -> None:
        *sources, target = step.words
        if "from" in step.flags:
            # A virtual environment knows its own path, so it must be the same in both stages.
            assert sources == [target]
            assert Path(self._inside(target)).is_dir()
            return
        for source in sources:
            if (PROJECT / source).is_dir():
                skip = shutil.ignore_patterns("__pycache__")
                shutil.copytree(PROJECT / source, self._folder / target, ignore=skip)
            else:
                shutil.copy2(PROJECT / source, self._folder / target)

    def _run(self, step: Step) -> None:
        text = self._inside(step.text)
        # Only root may give a folder away.
        text = text.replace("-o 10001 -g 10001", f"-o {os.geteuid()} -g {os.getegid()}")
        environment = os.environ | {"PATH": self._build_path}
        subprocess.run(["/bin/sh", "-ec", text], cwd=self._folder, env=environment, check=True)

    def run(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """What `docker compose exec relay WORDS` does."""
        return subprocess.run(
            words,
            cwd=self.root,
            env=self.environment | settings,
            capture_output=True,
            text=True,
            check=False,
        )

    def healthy(self, **settings: str) -> bool:
        """What the container's runtime does every few seconds."""
        (step,) = steps("HEALTHCHECK")
        command = json.loads(step.text.removeprefix("CMD"))
        limit_s = float(step.flags["timeout"].removesuffix("s"))
        begun_s = time.monotonic()
        result = self.run(*command, **settings)
        assert time.monotonic() - begun_s < limit_s
        assert result.stderr == ""
        return result.returncode == 0

    def files(self) -> set[tuple[str, int]]:
        """All files outside the volume, with their times of change."""
        (data,) = steps("VOLUME")
        volume = self.root / data.text.strip("/")
        paths = (path for path in self.root.rglob("*") if not path.is_relative_to(volume))
        return {(str(path), path.lstat().st_mtime_ns) for path in paths if not path.is_dir()}


def find_base(folder: Path) -> Path:
    """A folder with the `python` and `pip` that a base image has."""
    here = Path(sys.executable).parent
    if (here / "pip").exists():
        return here
    command = [sys.executable, "-m", "venv"]
    if find_spec("ensurepip") is None:
        command = ["uv", "venv", "--quiet", "--seed", "--python", sys.executable]
    subprocess.run([*command, folder], check=True)
    return folder / "bin"


def free_port() -> int:
    """A port that the system gives to nobody who does not ask for it by number."""
    for port in random.sample(range(20_000, 32_000), 100):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("no free port")


class Container:
    """A process started as the image says: entry point, command and environment."""

    def __init__(self, image: Image, log: Path, listen: str | None, **settings: str) -> None:
        self._image = image
        self.metrics_port = free_port()
        self.settings = {"MBX_RELAY_METRICS_LISTEN": f"0.0.0.0:{self.metrics_port}"} | settings
        if listen is not None:
            self.settings["MBX_RELAY_LISTEN"] = listen
        self._log = log
        (entry,), (command,) = steps("ENTRYPOINT"), steps("CMD")
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [*json.loads(entry.text), *json.loads(command.text)],
                cwd=image.root,
                env=image.environment | self.settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def healthy(self) -> bool:
        """What the health check says of it."""
        return self._image.healthy(**self.settings)

    def wait_healthy(self) -> None:
        """Wait until the health check says that it is healthy."""
        until_s = time.monotonic() + HEALTHY_S_MAX
        while not self.healthy():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < until_s, self._log.read_text()

    def stop(self) -> int:
        """SIGTERM, as `docker stop` does; the exit code."""
        self.process.terminate()
        return self.process.wait(STOP_S_MAX)


@contextmanager
def container(
    image: Image, folder: Path, listen: str | None = None, **settings: str
) -> Iterator[Container]:
    """A healthy container on the image's volume; it is killed in the end, if it still runs."""
    started = Container(image, folder / "relay.log", listen, **settings)
    try:
        started.wait_healthy()
        yield started
    finally:
        started.process.kill()
        started.process.wait()
