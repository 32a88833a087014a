"""scripts/setup with a Python that installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PYTHON = """#!/usr/bin/env bash
# Stands in for Python, venv and pip.
case "$*" in
*"import sysconfig"*) echo .venv/site-packages ;;
*"import torch"*) echo "$FAKE_TORCH" ;;
*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*"-m pip"*) echo "pip $*" >>pip.log; sleep "${FAKE_SLEEP:-0}"; exit "${FAKE_PIP:-0}" ;;
--version) echo "Python 3.11.0" ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    for name in (
        "scripts/setup",
        "requirements/cpu.txt",
        "requirements/cosched-cpu.pth",
        "pyproject.toml",
    ):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(profile, stderr=subprocess.PIPE, **environment):
        return subprocess.run(
            [tmp_path / "scripts/setup"],
            env=os.environ
            | {"COSCHED_PROFILE": profile, "COSCHED_PYTHON": str(python)}
            | environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=60,
        )

    run.stamp = tmp_path / ".venv/.cosched-setup"
    run.pip_log = tmp_path / "pip.log"
    return run


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_second_run_does_nothing(setup, profile):
    assert setup(profile, FAKE_TORCH="2.13.0 13.0").returncode == 0
    assert setup.stamp.exists()
    installs = setup.pip_log.read_text()
    assert "--editable" in installs
    assert setup(profile).returncode == 0
    assert setup.pip_log.read_text() == installs


def test_the_cpu_profile_prepares_every_process_and_says_how_to_use_the_environment(
    setup, tmp_path
):
    done = setup("cpu")
    assert (tmp_path / ".venv/site-packages/cosched-cpu.pth").exists()
    assert f"source {tmp_path}/.venv/bin/activate" in done.stderr
    setup("gpu", FAKE_TORCH="2.13.0 13.0")
    assert "cosched-cpu.pth" not in setup.pip_log.read_text()


def test_a_cpu_build_of_torch_in_the_gpu_profile_is_an_error(setup):
    done = setup("gpu", FAKE_TORCH="2.13.0+cpu None")
    assert done.returncode == 1
    assert "2.13.0+cpu, is built without CUDA" in done.stderr
    assert not setup.stamp.exists()


def test_a_failed_install_leaves_no_stamp_and_names_the_index_that_a_gpu_needs(setup):
    for profile in ("cpu", "gpu"):
        done = setup(profile, FAKE_PIP="1")
        assert done.returncode == 1
        assert ("NVIDIA's own package index" in done.stderr) == (profile == "gpu")
        assert not setup.stamp.exists()


def test_a_size_that_cannot_be_taken_does_not_end_the_install(setup, tmp_path):
    """pip's files come and go while it works; du fails when one that it has listed is gone."""
    programs = tmp_path / "programs"
    programs.mkdir()
    du = programs / "du"
    du.write_text("#!/bin/sh\nprintf '12\\t.venv\\n'\nexit 1\n")
    du.chmod(0o755)
    # On a terminal the size shows after two seconds.
    terminal, its_end = os.openpty()
    done = setup(
        "gpu",
        stderr=its_end,
        FAKE_TORCH="2.13.0 13.0",
        FAKE_SLEEP="3",
        PATH=f"{programs}:{os.environ['PATH']}",
    )
    os.close(its_end)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert "12 MB in .venv so far" in shown
    assert setup.stamp.exists()
