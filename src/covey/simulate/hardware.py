"""What devices can do, from their makers' data sheets. Nothing here was measured on them."""

from __future__ import annotations

from dataclasses import dataclass

from covey.errors import unknown

GIB = 2**30
NODE = 8  # GPUs of a machine that are joined by the fast link


@dataclass(frozen=True)
class Device:
    name: str
    flops: float  # of matrix products per second: bfloat16 without sparsity, on a CPU float32
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    link: float  # to another device of the same machine, bytes per second in one direction
    network: float  # to a device of another machine, bytes per second in one direction
    launch: float  # seconds that a layer takes however little there is to compute
    efficiency: float  # share of `flops` that training reaches
    itemsize: int  # bytes of a weight

    def between(self, ranks: int) -> float:
        """Bytes per second among so many devices: the slowest link counts."""
        return self.link if ranks <= NODE else self.network


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 2.0e12, 80 * GIB, 300e9, 25e9, 55e-6, 0.4, 2),
        Device("h100", 989e12, 3.35e12, 80 * GIB, 450e9, 50e9, 55e-6, 0.4, 2),
        Device("h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, 55e-6, 0.4, 2),
        Device("b200", 2250e12, 8.0e12, 180e9, 900e9, 50e9, 55e-6, 0.4, 2),
        # Two cores of a server, as in docs/benchmarks.md.
        Device("cpu", 189e9, 32e9, 16 * GIB, 5e9, 1e9, 150e-6, 0.7, 4),
    )
}


def device(name: str) -> Device:
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[name]
