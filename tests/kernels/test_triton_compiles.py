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

POINTERS = {"remainder": "*i8", "product": "*fp32", "columns": "*fp32", "basis": "*bf16", "squares": "*fp64"}
POINTERS |= {name: "*u8" for name in ("momentum_trits", "momentum_trits_2", "variance_trits")}
POINTERS |= {name: "*bf16" for name in ("grad", "weight", "momentum_scale", "momentum_scale_2", "variance_level")}
POINTERS |= {name: "*fp32" for name in ("times", "over")}
POINTERS |= {name: "*bf16" for name in ("variance_step", "carry_rows", "carry_columns", "new_rows", "new_columns")}

def compile_for(capability, kernel, **constants):
    signature, values, known = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        absent = name == "remainder" and not constants.get("REMAINDER")
        absent |= name.endswith("_2") and constants.get("PLANES") == 1
        absent |= constants.get("RANK") == 0 and name in ("carry_rows", "carry_columns", "new_rows", "new_columns")
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

layout = dict(UNIT=True, ALIGNED=True)
common = dict(BLOCK=128, **layout)
step = dict(ROWS=8, STOCHASTIC=True, **common)
for capability in (80, 90):
    compile_for(capability, triton_ternary.squares_kernel, ROWS=16, WIDTH=128, **layout)
    compile_for(capability, triton_ternary.step_kernel, PLANES=1, RANK=4, REMAINDER=False, **step)
    compile_for(capability, triton_ternary.step_kernel, PLANES=2, RANK=0, REMAINDER=True, **step)
    for kernel in (triton_ternary.product_kernel, triton_ternary.columns_kernel):
        compile_for(capability, kernel, ROWS=16, PLANES=1, RANK=4, **common)
"""


def run_script(folder: Path, text: str) -> list[str]:
    """The lines a script prints in a process where Triton compiles."""
    script = folder / "script.py"
    script.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join([source, *sys.path[1:]])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_kernels_compile_for_cuda_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert len(run_script(tmp_path, SCRIPT)) == 10


BIND = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
import leantune as lt
from leantune.kernels import gpu, triton_ternary

class Pretend:  # a CUDA driver that compiles and never launches
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_device_interface(self): return torch.cuda

driver.set_active(Pretend())
run = jit.JITFunction.run
jit.JITFunction.run = lambda self, *args, grid, warmup, **rest: run(self, *args, grid=grid, warmup=True, **rest)
gpu.takes = lambda *_: True
torch.empty = torch.zeros  # results that no kernel writes here are read

for shape, lr in (((256, 4096), 1e-3), ((1024, 4096), 1.0), ((64, 14336), 16), ((300, 576), 1e-5), ((64, 640), 2.0)):
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    optimizer = lt.TernaryAdamW([param], lr=lr)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = lr * (step + 1)
        param.grad = torch.zeros_like(param)
        optimizer.step()
names = ("squares_kernel", "step_kernel", "product_kernel", "columns_kernel")
for kernel in (getattr(triton_ternary, name) for name in names):
    print(kernel.__name__, len(kernel.device_caches[0][0]))
"""


@pytest.mark.slow
def test_o8_o9_one_compiled_kernel_for_all_shapes_rates_and_steps(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    lines = run_script(tmp_path, BIND)
    assert lines == ["squares_kernel 1", "step_kernel 1", "product_kernel 1", "columns_kernel 1"]
