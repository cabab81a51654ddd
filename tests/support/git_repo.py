"""Throwaway git repositories: a tiny kvbench with the outside of the real one, and any other project."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kvbench.common.packages import REPOSITORY

FAKE_SERVER = Path(__file__).with_name("fake_engine_server.py")


def git(repo: Path, *arguments: str, **more: str) -> str:
    """The command's output; with an identity of its own, and nothing of the user's configuration."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **more}
    who = ("-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *arguments], cwd=repo, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_all(repo: Path, subject: str) -> str:
    """Commits everything that is there; the sha."""
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", subject)
    return git(repo, "rev-parse", "HEAD")


def make_repo(repo: Path, files: dict[str, str]) -> Path:
    """A repository with one commit, "first"."""
    repo.mkdir(parents=True)
    git(repo, "init", "-q")
    write(repo, files)
    commit_all(repo, "first")
    return repo


def write(repo: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text, encoding="utf-8")


def make_tiny_kvbench(repo: Path) -> Path:
    """Packages of our names, our dependencies, and a server that takes our flags and computes nothing."""
    files = {f"{name}/__init__.py": "" for name in ("kvbench", "engine", "kernels", "engine/server")}
    files["engine/server/__main__.py"] = FAKE_SERVER.read_text(encoding="utf-8")
    files[".gitignore"] = "__pycache__/\n/results/\n"
    make_repo(repo, files)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, repo / name)
    commit_all(repo, "with dependencies")
    return repo
