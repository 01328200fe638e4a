"""Adds the supervisor's programs to the wheel. Hatchling calls this build hook.

Finds the programs, or builds them with cargo if they are missing, and strips copies of them. ``elf`` derives the
wheel's platform tag from the programs. Editable installations are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from elf import platform_tag

PROGRAMS = ("bulkhead-supervisor", "bulkhead-worker", "bulkhead")


PACKAGES = ("bulkhead-supervisor", "bulkhead-worker", "bulkhead-cli")
ROOT = Path(__file__).resolve().parents[2]


def find_programs() -> Path:
    """Returns the folder of the programs: ``$BULKHEAD_PROGRAMS``, or cargo's target folder.

    Builds the programs if they are missing from the target folder.
    """
    named = os.environ.get("BULKHEAD_PROGRAMS")
    folders = [Path(named)] if named else [_target_folder() / profile for profile in ("dist", "release")]
    if not named and shutil.which("cargo") and not any(map(_has_programs, folders)):
        print("building the programs; this takes a few minutes", file=sys.stderr, flush=True)
        packages = [word for package in PACKAGES for word in ("--package", package)]
        programs = [word for program in PROGRAMS for word in ("--bin", program)]
        subprocess.run(["cargo", "build", "--profile", "dist", *packages, *programs], cwd=ROOT, check=True)
    for folder in folders:
        if _has_programs(folder):
            return folder
    looked = ", ".join(map(str, folders))
    raise FileNotFoundError(
        f"{', '.join(PROGRAMS)} are not in {looked}: install cargo to build the programs, or set "
        "$BULKHEAD_PROGRAMS to the folder that contains the programs"
    )


def _has_programs(folder: Path) -> bool:
    return all((folder / program).is_file() for program in PROGRAMS)


def _target_folder() -> Path:
    """Returns cargo's target folder, from cargo's configuration or otherwise from ``$CARGO_TARGET_DIR``."""
    try:
        told = subprocess.run(
            ["cargo", "metadata", "--format-version", "1", "--no-deps"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        return Path(json.loads(told.stdout)["target_directory"])
    except (OSError, subprocess.CalledProcessError):
        return ROOT / os.environ.get("CARGO_TARGET_DIR", "target")


class ProgramsHook(BuildHookInterface[Any]):
    """Build hook that hatchling calls for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            raise RuntimeError("an editable installation is not supported: set $BULKHEAD_SUPERVISOR instead")
        source = find_programs()
        self._folder = tempfile.TemporaryDirectory(prefix="bulkhead-wheel-")
        stripped = [strip(source / program, Path(self._folder.name) / program) for program in PROGRAMS]
        for path in stripped:
            build_data["force_include"][str(path)] = f"bulkhead_supervisor/bin/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(stripped)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()


def strip(source: Path, target: Path) -> Path:
    """Copies a program without its symbols, or unchanged if ``strip`` is not available."""
    tool = shutil.which(os.environ.get("STRIP", "strip"))
    if tool is None or subprocess.run([tool, "-o", target, source], check=False).returncode != 0:
        shutil.copyfile(source, target)
    target.chmod(0o755)
    return target
