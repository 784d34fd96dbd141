"""The pool on a CUDA device: mapping it, reading and acknowledging in place, materializing staged patches.

    python -m benchmarks.cuda_pool

One device and one process, but for the client that maps. Needs torch and cuda-bindings. Times of the device are those
of replayed graphs that rotate among inputs larger than its cache; times of the host are medians over batches of calls.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch

from ipc.control import ControlMemory
from ipc.control_cuda import StreamAcknowledger
from ipc.cuda_devices import visible_devices
from ipc.materialize_cuda import DTYPES, DeviceSlice, materialize
from ipc.memory_cuda import DeviceReader, DeviceRegion

GIB = 1 << 30
WIDTH = 588  # values of a patch: 3 · 14 · 14
NUM_IMAGES = 4
NUM_CONSUMERS = 8
DEVICE = torch.device("cuda", 0)


def host_us(call: Callable[[], object], num_calls: int = 200, num_batches: int = 25) -> float:
    """Microseconds of the host for a call; the device is idle at the start of each batch."""
    times = []
    for _ in range(num_batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        times.append((time.perf_counter() - start) / num_calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def device_us(calls: Sequence[Callable[[], object]], num_rounds: int = 20) -> float:
    """Microseconds of the device for one of the calls, which work on different memory."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(num_rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def whole_us(call: Callable[[], object], num_calls: int = 100, num_batches: int = 15) -> float:
    """Microseconds from a call until the device is done with it, host time included."""

    def done() -> None:
        call()
        torch.cuda.synchronize()

    return host_us(done, num_calls, num_batches)


def map_once(fd: int, nbytes: int, uuid: str) -> None:
    """The client: seconds to map, in a process whose context is there already."""
    torch.zeros(1, device=DEVICE)
    DeviceReader.attach(fd, nbytes, uuid)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        region = DeviceReader.attach(fd, nbytes, uuid)
        times.append((time.perf_counter() - start) * 1e3)
        assert not region.tensor(nbytes - 256, 256).any()
    print(f"{statistics.median(times):.2f}")


def mapping() -> None:
    print("a client maps the pool (another process; the driver's import, map and access)")
    for gib in (0.25, 4, 32):
        start = time.perf_counter()
        with DeviceRegion.create(int(gib * GIB), DEVICE) as region:
            made = time.perf_counter() - start
            command = [sys.executable, "-m", "benchmarks.cuda_pool", "--map", str(region.fd), str(region.nbytes)]
            done = subprocess.run(
                [*command, region.uuid], pass_fds=[region.fd], check=True, capture_output=True, text=True
            )
            print(f"  {gib:5} GiB  {float(done.stdout):6.2f} ms   (made, zeroed and mapped: {made * 1e3:.0f} ms)")


def leasing(region: DeviceRegion) -> None:
    control = ControlMemory.create(8192)
    acknowledger = StreamAcknowledger(control, DEVICE)
    reader = DeviceReader.attach(region.fd, region.nbytes, region.uuid)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()

    def view() -> torch.Tensor:
        return reader.tensor(4096, 256 * 7168 * 2, control).view(torch.bfloat16).view(256, 7168)

    def both() -> None:
        view()
        acknowledger.acknowledge(5, 7, [side])

    print("host time of a lease, without the round trip (no work queued)")
    print(f"  view {host_us(view):5.2f} µs")
    print(f"  acknowledge on one stream {host_us(lambda: acknowledger.acknowledge(5, 7, [side])):5.2f} µs")
    print(f"  acknowledge on two streams {host_us(lambda: acknowledger.acknowledge(5, 7, [side, other])):5.2f} µs")
    print(f"  view and acknowledge {host_us(both):5.2f} µs")
    times = []
    for generation in range(1, 2001):
        torch.cuda.synchronize()
        start = time.perf_counter()
        acknowledger.acknowledge(9, generation, [side])
        while control.read(9) != generation:
            pass
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    print(f"acknowledgement, call to visible: p50 {times[1000]:.1f} µs, p99 {times[1980]:.1f} µs, idle stream")
    acknowledger.close()


def copy_gbs(nbytes: int, num_sets: int) -> float:
    pairs = [torch.randint(0, 256, (2, nbytes), dtype=torch.uint8, device=DEVICE) for _ in range(num_sets)]
    calls = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]
    return 2 * nbytes / device_us(calls) / 1e3


def large_copy_gbs(nbytes: int = 2 * GIB, num_calls: int = 10) -> float:
    """Not in a graph, whose copies of this size are slower."""
    pair = torch.randint(0, 256, (2, nbytes), dtype=torch.uint8, device=DEVICE)
    pair[0].copy_(pair[1])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    begin.record()
    for _ in range(num_calls):
        pair[0].copy_(pair[1])
    end.record()
    end.synchronize()
    return 2 * nbytes * num_calls / begin.elapsed_time(end) / 1e6


def images(num_patches: int) -> list[DeviceSlice]:
    values = [torch.randn(num_patches * WIDTH, device=DEVICE).view(torch.uint8) for _ in range(NUM_IMAGES)]
    return [DeviceSlice(data, "float32", num_patches) for data in values]


def materialization() -> None:
    large = large_copy_gbs()
    print(
        f"materialization of {NUM_IMAGES} images, float32 patches, device time; a copy of 2 GiB moves {large:.0f} GB/s"
    )
    for num_patches, num_sets in ((1024, 24), (4096, 8)):
        sets = [images(num_patches) for _ in range(num_sets)]
        nbytes = sum(one.data.nbytes for one in sets[0])
        same_size = copy_gbs(nbytes, num_sets)
        for dtype in (torch.float32, torch.bfloat16):
            outs = [torch.empty(NUM_IMAGES * num_patches, WIDTH, dtype=dtype, device=DEVICE) for _ in sets]
            calls = [lambda one=one, out=out: materialize(one, out) for one, out in zip(sets, outs, strict=True)]
            taken = device_us(calls)
            gbs = (nbytes + outs[0].nbytes) / taken / 1e3
            print(
                f"  {num_patches} patches to {str(dtype)[6:]:8} {taken:6.1f} µs {gbs:5.0f} GB/s: {gbs / large:4.0%} of "
                f"that, {gbs / same_size:4.0%} of a copy of {nbytes / 1e6:.0f} MB; host {host_us(calls[0], 50):4.1f} µs"
            )


def eager(num_patches: int) -> None:
    """Every consumer copies every image, on its own stream, by the same code; against one that does."""
    slices = images(num_patches)
    streams = [torch.cuda.Stream() for _ in range(NUM_CONSUMERS)]
    outs = [torch.empty(NUM_IMAGES * num_patches, WIDTH, device=DEVICE) for _ in streams]

    def once() -> int:
        materialize(slices, outs[0])
        return len(slices)

    def by_all() -> int:
        start = torch.cuda.current_stream().record_event()
        for stream, out in zip(streams, outs, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                materialize(slices, out)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return len(slices) * len(streams)

    one, everyone = device_us([once] * 8), device_us([by_all] * 8)
    ratio = f"{everyone / one:.1f}×"
    print(f"  {num_patches} patches: reads {once()} and {by_all()}, {one:6.1f} and {everyone:6.1f} µs: {ratio}")


def ragged() -> None:
    print("packed materialization against `.to()` of each and `torch.cat`, host time included, output allocated")
    chance = torch.Generator().manual_seed(1)
    everything = list(DTYPES)
    for name, num_items, longest, dtypes in (
        ("uint8", 8, 1024, ["uint8"]),
        ("float32", 8, 1024, ["float32"]),
        ("four dtypes", 16, 1024, everything),
        ("four dtypes", 64, 256, everything),
        ("four dtypes", 8, 4096, everything),
    ):
        rows = torch.randint(16, longest + 1, (num_items,), generator=chance).tolist()
        kinds = [dtypes[index % len(dtypes)] for index in range(num_items)]
        values = [
            torch.randint(0, 256, (count, WIDTH), dtype=torch.uint8, device=DEVICE).to(DTYPES[kind])
            for count, kind in zip(rows, kinds, strict=True)
        ]
        slices = [DeviceSlice(v.view(-1).view(torch.uint8), k, len(v)) for v, k in zip(values, kinds, strict=True)]
        compare(f"{num_items} of {name}, up to {longest} rows", values, slices)


def compare(name: str, values: Sequence[torch.Tensor], slices: Sequence[DeviceSlice]) -> None:
    num_rows = sum(one.num_rows for one in slices)

    def by_cat() -> torch.Tensor:
        return torch.cat([each.to(torch.bfloat16) for each in values])

    def packed() -> torch.Tensor:
        out = torch.empty(num_rows, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        materialize(slices, out)
        return out

    assert torch.equal(by_cat(), packed()), "the two ways differ"
    moved = sum(one.data.nbytes for one in slices) + num_rows * WIDTH * 2
    slow, fast = whole_us(by_cat), whole_us(packed)
    slow_host, fast_host = host_us(by_cat, 50), host_us(packed, 50)
    print(
        f"  {name:36} {moved / 1e6:5.1f} MB  call to done {slow:6.1f} and {fast:5.1f} µs: {slow / fast:4.1f}×"
        f"   one after another {slow_host:6.1f} and {fast_host:5.1f} µs: {slow_host / fast_host:4.1f}×"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", nargs=3, metavar=("FD", "NBYTES", "UUID"), help="be the client that maps")
    arguments = parser.parse_args()
    if arguments.map:
        fd, nbytes, uuid = arguments.map
        map_once(int(fd), int(nbytes), uuid)
        return
    torch.cuda.init()
    with open("/proc/driver/nvidia/version", encoding="ascii") as lines:
        driver = next(word for word in lines.readline().split() if word[0].isdigit())
    print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {visible_devices()[0].name}, driver {driver}")
    print(f"torch {torch.__version__}, cuda-bindings {version('cuda-bindings')}, Python {sys.version.split()[0]}")
    mapping()
    with DeviceRegion.create(GIB, DEVICE) as region:
        leasing(region)
    materialization()
    print(f"{NUM_IMAGES} images once, and by each of {NUM_CONSUMERS} consumers on a stream of its own, float32")
    eager(1024)
    eager(4096)
    ragged()


if __name__ == "__main__":
    main()
