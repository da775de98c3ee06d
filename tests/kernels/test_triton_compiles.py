"""The Triton kernels compile for a GPU that is not here: what the interpreter cannot tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from leantune.kernels import triton_ternary

POINTERS = {"remainder": "*i8", "product": "*fp32", "columns": "*fp32", "basis": "*fp32"}
POINTERS |= {name: "*u8" for name in ("momentum_trits", "momentum_trits_2", "variance_trits")}
POINTERS |= {name: "*bf16" for name in ("grad", "weight", "momentum_scale", "momentum_scale_2", "variance_level")}
POINTERS |= {name: "*bf16" for name in ("variance_step", "carry_rows", "carry_columns", "new_rows", "new_columns")}

def compile_for(capability, kernel, **constants):
    signature, values, known = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        absent = name == "remainder" and not constants.get("REMAINDER")
        absent |= name.endswith("_2") and constants["PLANES"] == 1
        absent |= constants["RANK"] == 0 and name in ("carry_rows", "carry_columns", "new_rows", "new_columns")
        if name in constants or absent:
            signature[name], values[name] = "constexpr", constants.get(name)
        elif name in POINTERS:
            signature[name], known[(place,)] = POINTERS[name], [["tt.divisibility", 16]]
        else:
            signature[name] = kernel.params[place].annotation_type or "fp32"
    source = ASTSource(kernel, signature, values, known)
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert signature["rows"] == "i64" and len(made.asm["cubin"]) > 0
    print(kernel.__name__, capability, len(made.asm["cubin"]), flush=True)

common = dict(BLOCK=128, UNIT=True, ALIGNED=True)
step = dict(ROWS=8, STOCHASTIC=True, **common)
for capability in (80, 90):
    compile_for(capability, triton_ternary.step_kernel, PLANES=1, RANK=4, REMAINDER=False, **step)
    compile_for(capability, triton_ternary.step_kernel, PLANES=2, RANK=0, REMAINDER=True, **step)
    for kernel in (triton_ternary.product_kernel, triton_ternary.columns_kernel):
        compile_for(capability, kernel, ROWS=16, PLANES=1, RANK=4, **common)
"""


@pytest.mark.slow
def test_kernels_compile_for_cuda_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "compile_kernels.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([source, *sys.path[1:]])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 8
