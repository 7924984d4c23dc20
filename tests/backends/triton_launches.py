"""Start the kernels as on a GPU that need not be there, with the sizes it would get: they are compiled and not run.

Run as a script: Triton must not interpret. Prints a line for each kernel that a launch compiles: case, name, bytes of
the stack, bytes of shared memory.
"""

import os
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton_sources import usage

from kvkeep.attention_stats import Low, Mass
from kvkeep.backends import AttentionInputs
from kvkeep.backends.base import Added, SlotLimits, WantedReport
from kvkeep.backends.triton import launch, ops, prefill_ops
from kvkeep.kv.slot_codec import CodedSlots, blank
from kvkeep.kv_bits import KV_BITS
from kvkeep.types import AttentionOptions, Slots


class Device:
    """What Triton asks a driver before it compiles."""

    def __init__(self, arch):
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(case):
    """Let launches compile, with the arguments they would have, and print what each kernel takes."""

    def launch(kernel, grid):
        def compile_it(*arguments, **named):
            made = kernel.run(*arguments, grid=grid, warmup=True, **named)
            print(case[0], kernel.__name__, usage(made.asm["cubin"])[1], made.metadata.shared, flush=True)

        return compile_it

    JITFunction.__getitem__ = launch


def pretend(arch):
    """Tensors on the CPU count as on the device."""
    driver.set_active(Device(arch))
    there = launch.Kernels(frozenset({"cpu"}), "compiled only")
    launch.kernels = lambda: there
    launch._capability = lambda device: str(arch // 10)
    launch._tile = lambda table, dim, like: table[True, like.element_size(), launch.power(dim, least=64)]


def token(dtype, dim, S, options, wanted):
    """A step with append and eviction, and attention alone."""
    query, keys = torch.empty(2, 8, 1, dim, dtype=dtype), torch.empty(2, 2, S, dim, dtype=dtype)
    now, positions = torch.empty(2, 1, dtype=torch.long), torch.empty(2, 2, S, dtype=torch.int32)
    limits = SlotLimits(now[:, 0], 2, 10, S - 1, options.window)
    new, states = (keys[:, :, :1], keys[:, :, :1]), (torch.empty(2, 2, S),)
    added = Added(states, True)
    slots = Slots(keys, keys, positions)
    ops.step(query, slots, new, now, options=options, wanted=wanted, added=added, limits=limits)
    ops.attend(query, slots, now, options=options, wanted=wanted)
    for key_bits, value_bits in KV_BITS.values():
        coded = CodedSlots.of(blank(keys, S, key_bits), blank(keys, S, value_bits), positions, dtype)
        ops.write(coded, new, now)
        ops.attend(query, coded, now, options=options, wanted=wanted)


def prompt(dtype, dim, statistic, options):
    query, keys = (torch.empty(1, 64, heads, dim, dtype=dtype).transpose(1, 2) for heads in (8, 2))
    at = torch.arange(64)[None]
    slots = Slots(keys, keys, at[:, None].int())
    prefill_ops.attend(AttentionInputs(query, slots, at, statistic=statistic, options=options), output="triton")


def main(arch):
    pretend(arch)
    case = [""]
    compile_only(case)
    plain = AttentionOptions(scaling=0.1)
    everything = AttentionOptions(scaling=0.1, window=50, softcap=30.0, sinks=torch.empty(8))
    case[0] = "token"
    token(torch.bfloat16, 128, 1025, plain, WantedReport(None, -1))
    case[0] = "first-token"
    token(torch.float16, 64, 1, everything, WantedReport(None, 1, torch.empty(2)))
    case[0] = "long-head"
    token(torch.bfloat16, 256, 513, plain, WantedReport("low", -1))
    case[0] = "prompt"
    prompt(torch.bfloat16, 128, Mass(), plain)
    case[0] = "prompt-with-everything"
    prompt(torch.bfloat16, 256, Low(), everything)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    main(int(sys.argv[1]))
