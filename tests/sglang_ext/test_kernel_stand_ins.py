"""The stand-in for `sgl_kernel` can be imported from anywhere in it, and used nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sglang_ext

STUBS = Path(sglang_ext.__file__).parent / "cpu" / "stubs"


def run_with_stubs(code: str, visible: str | None = "") -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(STUBS)}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import sgl_kernel",
        "from sgl_kernel import rmsnorm",
        "from sgl_kernel.flash_attn import flash_attn_varlen_func",
        "import sgl_kernel.a.b.c",
        "from sgl_kernel import ScalarType; ScalarType.uint4.name",
    ],
)
def test_names_can_be_imported(code: str) -> None:
    result = run_with_stubs(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("code", "kernel"),
    [
        ("from sgl_kernel import rmsnorm; rmsnorm(1, 2)", "sgl_kernel.rmsnorm"),
        (
            "from sgl_kernel.flash_attn import flash_attn_varlen_func as f; f()",
            "sgl_kernel.flash_attn.flash_attn_varlen_func",
        ),
    ],
)
def test_calling_a_kernel_fails_loudly_and_names_it(code: str, kernel: str) -> None:
    result = run_with_stubs(code)
    assert result.returncode == 1
    assert f"{kernel} was called on a machine without a GPU" in result.stderr


def test_missing_dunder_attributes_are_missing() -> None:
    """`hasattr` and `inspect` must see an ordinary module, not one that has everything."""
    result = run_with_stubs("import sgl_kernel; assert not hasattr(sgl_kernel, '__wrapped__')")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("driver", "visible", "imported"),
    [(True, None, False), (True, "0", False), (True, "", True), (False, None, True)],
)
def test_beside_a_gpu_that_the_process_may_use_it_is_refused(
    driver: bool, visible: str | None, imported: bool
) -> None:
    """A shell that exported PYTHONPATH for CPU workers must not break a GPU worker in mid-run."""
    code = (
        "import os; there = os.path.exists\n"
        f"os.path.exists = lambda p: {driver} if 'nvidia' in str(p) else there(p)\n"
        "import sgl_kernel"
    )
    result = run_with_stubs(code, visible)
    assert (result.returncode == 0) is imported, result.stderr
    if not imported:
        assert "take its folder out of PYTHONPATH" in result.stderr
