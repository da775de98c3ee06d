"""What goes wrong for people who train with little memory: a row a fault, and at least one test that carries its name.

A test of fault P13 is called ``test_p13_...`` (of several faults ``test_g1_g5_...``); `tests/conftest.py` gives it
``@pytest.mark.trap(id="P13")``: ``pytest -m 'trap(id="P13")'`` runs those of one fault, ``pytest -m trap`` all of them.
"""

import ast
from pathlib import Path

import pytest
from trap_names import traps_of

TRAPS = {
    # Optimizer states.
    "O1": "a loaded state keeps its own dtypes; training goes on bit for bit",
    "O2": "a state loads on another device, and with weights_only=True",
    "O3": "a state is saved before any step, after one, and with frozen parameters",
    "O4": "rows that the number of processes does not divide",
    "O5": "what is kept exact is decided by the whole shape, not by a shard's",
    "O6": "a sharded state goes on after loading, also on another number of processes",
    "O7": "a state of another format, block or number of planes is converted or refused",
    "O8": "the rate as number, tensor or schedule, in every group; no kernel is compiled again for it",
    "O9": "one compiled kernel for all shapes",
    "O10": "rounding is the same on replicas and independent of the sharding",
    "O11": "no buffer takes the default dtype",
    "O12": "a group can be kept exact, and the report lists every parameter's storage",
    "O13": "a weight without a gradient does not drift",
    "O14": "gradients that are not contiguous are right, weights that are not are refused",
    "O15": "more than 2^31 elements",
    "O16": "no argument is accepted and ignored",
    "O17": "tied weights are stepped, and saved, once",
    "O18": "a step's temporaries do not grow with the parameter",
    "O19": "a gradient that is not finite is refused by name",
    "O20": "sparse, complex, empty and 0-dimensional parameters work or are refused",
    "O21": "narrow weights take small steps, and the log shows those that stand still",
    # Gradients under a fused backward.
    "G1": "clipping is what was asked for",
    "G2": "accumulated micro-batches are one step, or refused",
    "G3": "a schedule reaches the hooks and moves once a step",
    "G4": "processes train as one",
    "G5": "the true norm is known after the gradients are gone",
    "G6": "tied weights are updated once; reentrant checkpointing is refused",
    "G7": "a parameter whose hook is gone is named",
    "G8": "an overflow drops a whole step, and the scale recovers",
    "G9": "weight decay and the optimizer's settings are applied or refused",
    "G10": "frozen parameters have no hooks",
    "G11": "an ordinary state_dict, from which training goes on",
    "G12": "work grows with the number of parameters, not with its square",
    "G13": "the peak that the logits would be",
    "G14": "a loss survives two backwards over one forward",
    "G15": "a parameter unused on one process hangs none",
    # Activations.
    "A1": "checkpointing over frozen embeddings trains; who gets no gradient is named",
    "A2": "what checkpointed blocks keep of a projection: nothing, said before",
    "A3": "adapters share their input",
    "A4": "what a quantised base keeps in full is counted",
    "A5": "no logits in float32",
    "A6": "an evaluation collects no logits, and keeps nothing",
    "A7": "the longest rows come first",
    "A8": "widths that the number of sub-tokens does not divide",
    "A9": "directions are one on all processes, and saved",
    "A10": "a target that matches nothing lists close names",
    # Planning, data, running.
    "P1": "a plan counts every part and stage",
    "P2": "every figure says at which batch and length",
    "P3": "resuming needs no more memory than training",
    "P4": "saving is planned, and tried before the first step",
    "P5": "dtypes of weights, products, gradients and states are said",
    "P6": "a loss that is not finite stops the run, and the last checkpoint stays",
    "P7": "rows that teach nothing are counted and named",
    "P8": "unknown columns are answered with the shapes that are known",
    "P9": "packed rows do not see one another",
    "P10": "running out of memory is explained",
    "P11": "a wrong key is an error that says what to write",
    "P12": "what was being written when a run was killed is never taken for whole",
    "P13": "a resumed run is the same run, in a later epoch and packed",
    "P14": "one device a process, said in the header",
    "P15": "roles of other names are mapped",
    "P16": "of a conversation the assistant's turns and their ends are learnt",
}


@pytest.fixture(scope="module")
def carried() -> set[str]:
    """The faults in the names of all tests there are, slow and skipped ones included."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.rglob("test_*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {trap for name in names for trap in traps_of(name)}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_fault_has_a_test(carried: set[str], trap: str) -> None:
    assert trap in carried, f"no test is called test_{trap.lower()}_...: {TRAPS[trap]}"


def test_no_test_names_a_fault_that_is_not_listed(carried: set[str]) -> None:
    assert sorted(carried - TRAPS.keys()) == []


def test_a_tests_faults_are_read_from_its_name() -> None:
    assert traps_of("test_g1_g5_fused[p3-x]") == ["G1", "G5"]
    assert traps_of("test_a_row") == traps_of("test_p_13") == traps_of("g1_x") == []
