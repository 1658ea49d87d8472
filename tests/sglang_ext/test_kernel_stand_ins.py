"""The stand-in for `sgl_kernel` can be imported from anywhere in it, and used nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sglang_ext

STUBS = Path(sglang_ext.__file__).parent / "cpu" / "stubs"


def run_with_stubs(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(STUBS)},
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
