"""Compile the kernels for a GPU that need not be there. Run as a script: Triton must not interpret.

Prints a line for each: name, registers and bytes that spilled.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvkeep.backends.triton import decode, launch, prefill, slots

SMALL = {"G": 3, "E": 32, "BLOCK_E": 32}
FLAGS = ("CAPPED", "KEEPS", "APPENDS", "SINKS", "TEMPERED", "COUNTED", "GAINS", "NEWEST", "LIVE", "REPORTS", "BY_SUM")
FLAGS += (
    "LOSES",
    "RECENTS",
    "LIMITS",
    "SLIDES",
    "CHOSEN",
    "SCORED",
    "WINDOWED",
    "SUNK",
    "GAINED",
    "MIXED",
    "BOUNDED",
    "LOW",
)
TYPES = {
    "{half}": "query keys values new_keys new_values out key_scales value_scales",
    "*fp32": "mixes bounds logits sinks mass extra gains total other scores lost",
    "*i32": "positions",
    "*i64": "now counted newest ages recents limits prompts",
    "fp32": "scaling softcap gain log_decay theta keep",
}
PREFILL = {
    "lse gain weights shares sums": "*fp32",
    "bounds starts ends k_positions": "*i32",
    "oldest q_positions": "*i64",
}
PREFILL |= {"inner outer": "fp32"}


PLAIN = {"KEY_BITS": 16, "VALUE_BITS": 16, "KEY_GROUP": 1, "VALUE_GROUP": 1}
CODED = {"KEY_BITS": 8, "VALUE_BITS": 4, "KEY_GROUP": 32, "VALUE_GROUP": 32, "APPENDS": False}


def compiled(kernel, arch, half, **constants):
    """Compile a kernel with every branch taken, but those that the constants switch off."""
    signature, values = {}, {}
    kinds = {name: kind.replace("{half}", f"*{half}") for kind, names in TYPES.items() for name in names.split()}
    kinds["slots"] = "*i64" if kernel is slots.append else "*i32"
    if kernel in (prefill.forward, prefill.columns):
        kinds |= {name: kind for names, kind in PREFILL.items() for name in names.split()}
    if constants.get("KEY_BITS", 16) != 16:
        kinds |= {"keys": "*i8", "values": "*u8", "key_scales": "*fp16", "value_scales": "*fp16"}
    if kernel is slots.append_codes:
        kinds |= {"new_keys": "*fp32", "slots": "*i64"}
    constants = dict.fromkeys(FLAGS, True) | constants
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
        else:
            signature[name] = kinds.get(name, "i32")
    source = ASTSource(kernel, signature, values)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, "num_stages": 3})


def usage(binary):
    """Registers of a thread and bytes of its stack, where what does not fit into registers goes."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return [int(re.search(rf"{name}:(\d+)", done.stdout + done.stderr)[1]) for name in ("REG", "STACK")]


def main(arch, half):
    tile = {"TILE": 64, "BLOCK_G": 4, **SMALL}
    keys = {"D": 32, "BLOCK_D": 32, "SCAN": 64}
    rows = {"BLOCK_T": 64, "BLOCK_S": 32, "WIDE": False}
    split = {**tile, **keys, "BLOCK_G": launch.power(3), "TILE": 16, "SPLIT": 64, "WIDE": False}
    for kernel, constants in (
        (decode.attend_split, {**split, **PLAIN}),
        (decode.attend_split, {**split, **CODED}),
        (decode.merge, {**tile, "KIND": 3}),
        (decode.merge_evict, {**tile, "STATES": 2}),
        (slots.append, {**keys, **SMALL}),
        (slots.evict, {"SCAN": 64}),
        (slots.append_codes, {**CODED, "D": 64, "E": 32, "SCAN": 64, "KEY_BLOCK": 32, "VALUE_BLOCK": 16}),
        (prefill.forward, {**tile, **keys, **rows}),
        (prefill.columns, {**keys, **rows, "G": 3}),
    ):
        result = compiled(kernel, arch, half, **constants)
        print(kernel.__name__, *usage(result.asm["cubin"]), flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    main(int(sys.argv[1]), sys.argv[2])
